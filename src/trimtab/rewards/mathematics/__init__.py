"""The grammar and the algebra behind the `math` rule: LaTeX to expressions, expressions compared exactly."""
