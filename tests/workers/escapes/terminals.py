# %% clear the reader's screen
# proof: no, what is shown is judged by the command's test
print("\x1b[2J\x1b[H\x1b]0;title\x07\x1b]52;c;ZXNjYXBlZA==\x07\x9b2J")

# %% bytes that are no text
# proof: no, the result's type is judged
os.write(1, bytes(range(256)) * 8)

# %% half a character at the end
# proof: no, the result's type is judged
os.write(1, "ü".encode()[:1] + b"\xf0\x9f\x98")

# %% half a surrogate
# proof: no, the result's type is judged
sys.stdout.buffer.write("\ud800".encode("utf-8", "surrogatepass"))
sys.stdout.buffer.flush()
raise ValueError("\udcff\ud800")

# %% a surrogate printed
# proof: no, the result's type is judged
print("\udce4")

# %% a character cut by the limit of the output
# proof: no, the result's type is judged
# timeout: 3
os.write(1, b"x" + "😀".encode() * (W.output_bytes // 4 + 1000))

# %% zeros
# proof: no, the result's type is judged
os.write(1, b"\0" * 4096)
raise ValueError("\0" * 100)

# %% another encoding
# proof: no, the result's type is judged
sys.stdout.reconfigure(encoding="utf-16", errors="surrogatepass")
print("\ud800 text")

# %% a name of an exception with control characters
# proof: no, the result's type is judged
raise type("Error\x1b[2J\n\r\x00\ud800", (Exception,), {"__module__": "\x1b]0;x\x07"})("\x1b[31mred\r\x08\x08")

# %% an exception without a name
# proof: no, the result's type is judged
class Meta(type):
    __name__ = property(lambda self: 1 / 0)
    __qualname__ = property(lambda self: 1 / 0)
    __module__ = property(lambda self: 1 / 0)
class Error(Exception, metaclass=Meta):
    def __str__(self):
        raise self
    __repr__ = __str__
raise Error

# %% a program that is no text
# proof: no, the result's type is judged
exec("x = '\ud800'\nraise ValueError(x)")

# %% output from descriptors that were closed
# proof: no, the result's type is judged
os.close(2)
os.close(0)
print("still here")
sys.stdout.close()
os.close(1)
1 / 0
