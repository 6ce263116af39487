# %% the variables of the parent
# proof: plain
print(dict(os.environ))

# %% the variables as the C library sees them
# proof: plain
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
for number in range(2000):
    if not environ or not environ[number]:
        break
    print(environ[number].decode(errors="replace"))

# %% what stood on the stack when the process started
# proof: plain
show_secrets(open("/proc/self/environ", "rb").read())

# %% the start of the stack, read without /proc
# proof: plain
environ = ctypes.c_void_p.in_dll(libc, "environ").value or 0
program = ctypes.c_char_p.in_dll(libc, "program_invocation_name")
names = ctypes.cast(program, ctypes.c_void_p).value or 0
for anchor in {environ, names}:
    if anchor:
        show_secrets(probe(anchor - (1 << 16), anchor + (1 << 19)))

# %% the arguments of the parent
# proof: plain
print(open("/proc/%d/cmdline" % os.getppid()).read())
print(sys.argv, sys.orig_argv, sys.flags)

# %% all memory of this process that can be written
# proof: plain
for line in open("/proc/self/maps"):
    span, mode, *_ = line.split()
    low, high = (int(end, 16) for end in span.split("-"))
    if mode.startswith("rw") and high - low < 1 << 28:
        with quiet():
            for start in range(low, high, 1 << 22):
                show_secrets(probe(start, min(high, start + (1 << 22))))

# %% the heap, read without /proc
# proof: plain
libc.sbrk.restype = ctypes.c_void_p
top = libc.sbrk(0)
show_secrets(probe(top - (1 << 25), top))
for anchor in (id(object()), id(W), id(os.environ), id(sys.argv)):
    show_secrets(probe(anchor - (1 << 22), anchor + (1 << 22)))

# %% objects that the garbage collector still knows
# proof: no, a plain program has its variables anyway
import gc
for thing in gc.get_objects():
    with quiet():
        if type(thing) in (dict, list, tuple) and len(thing) < 2000:
            show_secrets(repr(thing)[:20_000].encode() if any(type(v) in (str, bytes) and "plan" + "ted" in str(v) for v in (thing.values() if type(thing) is dict else thing)) else b"")

# %% frames of those who started the program
# proof: no, a plain program has none above it
frame = sys._getframe()
while frame:
    for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
        if name != "W":
            show_secrets(repr(value)[:20_000].encode())
    frame = frame.f_back
