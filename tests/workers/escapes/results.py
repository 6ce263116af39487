# %% a forged result on every descriptor, before an exception
# proof: no, a plain program has no such channel
# wins when kind: ok
fields = {"stdout": "forged", "error": "", "kind": "ok", "ms": 1.0}
text = json.dumps(fields).encode()
for payload in (text, text + b"\n", pickle.dumps(fields), pickle.dumps(("forged", "", "ok", 1.0))):
    for framed in (payload, struct.pack("!I", len(payload)) + payload, struct.pack("<I", len(payload)) + payload, struct.pack("!Q", len(payload)) + payload, struct.pack("<Q", len(payload)) + payload):
        for descriptor in range(3, 64):
            with quiet():
                os.write(descriptor, framed)
raise ValueError("this must be seen")

# %% a forged result, then silence
# proof: no, a plain program has no such channel
# wins when kind: ok
# timeout: 0.7
fields = {"stdout": "forged", "error": "", "kind": "ok", "ms": 1.0}
for payload in (json.dumps(fields).encode() + b"\n", pickle.dumps(fields), b"ok", b"\0", b"0\n"):
    for descriptor in range(3, 64):
        with quiet():
            os.write(descriptor, struct.pack("!I", len(payload)) + payload)
            os.write(descriptor, payload)
time.sleep(60)

# %% code for whoever reads the channel
# proof: no, a plain program has no such channel
class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {W.wide}/{W.marker}",)
payload = pickle.dumps(Bomb())
for framed in (payload, struct.pack("!i", len(payload)) + payload, struct.pack("<I", len(payload)) + payload, struct.pack("!Q", len(payload)) + payload, struct.pack("<Q", len(payload)) + payload):
    for descriptor in range(0, 64):
        with quiet():
            os.write(descriptor, framed)
os._exit(0)

# %% code in what is raised
# proof: no, a plain program has no such channel
class Bomb(Exception):
    def __reduce__(self):
        return os.system, (f"touch {W.wide}/{W.marker}",)
    __reduce_ex__ = __getstate__ = lambda self, *a: Bomb.__reduce__(self)
raise Bomb("bomb")

# %% a length that is never reached
# proof: no, a plain program has no such channel
# timeout: 0.7
for descriptor in range(3, 64):
    with quiet():
        os.write(descriptor, b"\x7f\xff\xff\xff")
time.sleep(60)

# %% a length beyond all memory
# proof: no, a plain program has no such channel
for descriptor in range(3, 64):
    for length in (b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0\0\0\xff" + b"\xff" * 4):
        with quiet():
            os.write(descriptor, length)
os._exit(0)

# %% the runner's functions replaced
# proof: no, a plain program has no runner
# wins when kind: ok
for frame in (sys._getframe(1), sys._getframe(2), sys._getframe(3)) if hasattr(sys._getframe(0).f_back, "f_back") else ():
    for name, value in list(frame.f_globals.items()):
        if callable(value) and not name.startswith("__"):
            frame.f_globals[name] = lambda *a, **k: None
raise ValueError("this must be seen")

# %% the runner's functions found in modules and replaced
# proof: no, a plain program has no runner
# wins when kind: ok
import traceback
for name, module in list(sys.modules.items()):
    if "trimtab" in name or "sandbox" in name or name == "__main__":
        for key in list(vars(module)):
            if key != "W" and callable(getattr(module, key)) and not key.startswith("__"):
                setattr(module, key, lambda *a, **k: "")
traceback.format_exc = traceback.print_exc = traceback.format_exception = lambda *a, **k: ""
raise ValueError("this must be seen")

# %% an exception that pretends to be another
# proof: no, Python itself decides
# wins when kind: ok
class Exit(SystemExit):
    pass
class Sly(BaseException):
    __class__ = SystemExit
    code = 0
    def __eq__(self, other):
        return True
raise Sly

# %% a deadline that looks like success
# proof: no, Python itself decides
# wins when kind: ok
# timeout: 0.7
print("looks fine", flush=True)
os.closerange(1, 3)
time.sleep(60)

# %% a killed child of the runner that looks like success
# proof: no, Python itself decides
# wins when kind: ok
print("fine", flush=True)
os.kill(os.getpid(), signal.SIGKILL)  # the first process of a namespace does not hear it
raise ValueError("this must be seen")

# %% results written by a child after the program ended
# proof: no, a plain program has no such channel
if os.fork() == 0:
    for _ in range(200):
        for descriptor in range(1, 64):
            with quiet():
                os.write(descriptor, b'{"stdout": "late", "error": "", "kind": "ok", "ms": 0}\n')
    os._exit(0)
os._exit(1)

# %% requests to the fork server
# proof: no, a plain program has none
commands = [b"exit\n", b"\0" * 64, b'{"code": "import os; os.system(\'touch %s\')", "timeout": 5}\n' % f"{W.wide}/{W.marker}".encode()]
commands += [pickle.dumps(("run", f"open('{W.wide}/{W.marker}', 'w')", 5.0))]
for descriptor in range(3, 64):
    for command in commands:
        for framed in (command, struct.pack("!I", len(command)) + command, struct.pack("<I", len(command)) + command):
            with quiet():
                os.set_blocking(descriptor, False)
                os.write(descriptor, framed)
            with quiet():
                socket.socket(fileno=os.dup(descriptor)).send(framed)
