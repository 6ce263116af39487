"""An environment of the user's own, as the text of its module: the same class runs in TRL and in verl."""

from __future__ import annotations

ENVIRONMENT = '''
class Notebook:
    """Adds up numbers through a conversation."""

    def reset(self, problem) -> str:
        self.total = 0
        return f" answer {problem.answer}"

    def add(self, number: int) -> str:
        """Add a number to the total.

        Args:
            number: The number.
        """
        self.total += number
        return str(self.total)

    def reward(self, conversation) -> float:
        return self.total + len(conversation.messages) / 100
'''
