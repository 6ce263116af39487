# %% system calls of 32 bits
# proof: machine
# mov eax, edi; mov ebx, esi; int 0x80; ret   (rbx is the caller's)
code = machine_code(bytes.fromhex("5389f889f3cd805bc3"), ctypes.c_long, ctypes.c_int, ctypes.c_int)
if 0 <= ctypes.c_int(code(310, NEWUSER)).value:  # unshare
    won("unshare")

# %% keys by 32 bits
# proof: machine
code = machine_code(bytes.fromhex("5389f889f389d1cd805bc3"), ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int)
if ctypes.c_int(code(288, 0, -3)).value >= 0:  # keyctl
    won("keyctl")

# %% a socket by 32 bits
# proof: machine
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)  # MAP_32BIT
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
page[0:12] = struct.pack("=III", 16, 3, 0)  # netlink
code = machine_code(bytes.fromhex("5389f889f389d1cd805bc3"), ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int)
if ctypes.c_int(code(102, 1, address)).value >= 0:  # socketcall
    won("socketcall")

# %% tracing by 32 bits
# proof: machine
code = machine_code(bytes.fromhex("5389f889f389d1cd805bc3"), ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int)
if ctypes.c_int(code(26, 0, 0)).value >= 0:  # ptrace
    won("ptrace")

# %% system calls of the x32 kind
# proof: no, few kernels have it
if call(0x40000000 | X86_64["unshare"], NEWUSER) == 0:
    won("unshare")
if call(0x40000000 | 521, 0, 0, 0, 0) == 0:
    won("ptrace")

# %% numbers beyond all calls
# proof: no, the kernel refuses them
for number in (-1, 1 << 31, 1 << 32 | X86_64["unshare"], 0xFFFFFFFF00000000 - (1 << 64) | X86_64["unshare"]):
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(NEWUSER)) == 0:
        won(hex(number))

# %% flags hidden in the upper half of an argument
# proof: no, the kernel refuses them
if call("unshare", NEWUSER | 1 << 40) == 0 or call("clone", NEWUSER | 17 | 1 << 33, 0, 0, 0, 0) == 0:
    won("flags")

# %% an own filter that allows all
# proof: machine
code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000))
libc.prctl(38, 1, 0, 0, 0)
libc.prctl(22, 2, struct.pack("=HxxxxxxQ", 1, ctypes.addressof(code)), 0, 0)
if call("unshare", NEWUSER) == 0:
    won("unshare")

# %% an own filter whose calls a thread decides
# proof: machine
# timeout: 2
filter = struct.pack("=HBBI", 0x20, 0, 0, 0) + struct.pack("=HBBI", 0x15, 0, 1, 272) + struct.pack("=HBBI", 0x06, 0, 0, 0x7FC00000) + struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(filter)
libc.prctl(38, 1, 0, 0, 0)
listener = call("seccomp", 1, 8, struct.pack("=HxxxxxxQ", 4, ctypes.addressof(code)))
def decide():
    import fcntl
    question = bytearray(80)
    fcntl.ioctl(listener, 0xC0502100, question)
    fcntl.ioctl(listener, 0xC0182101, question[:8] + struct.pack("=qiI", 0, 0, 1))  # go on
if listener >= 0:
    threading.Thread(target=decide, daemon=True).start()
    in_child(lambda: won("unshare") if call("unshare", NEWUSER) == 0 else None)

# %% a program that was never on a disk
# proof: plain
descriptor = os.memfd_create("program", 0)
with quiet():
    os.write(descriptor, open("/bin/cat", "rb").read())
child = os.fork()
if child == 0:
    os.execve(descriptor, ["cat", W.secret_file], {})
os.waitpid(child, 0)

# %% a program started by the loader
# proof: plain
for loader in glob.glob("/lib64/ld-linux*") + glob.glob("/lib/ld-linux*"):
    print(subprocess.run([loader, "/bin/cat", W.secret_file], capture_output=True, text=True).stdout)

# %% code written into a page that can be run
# proof: plain
# openat(AT_FDCWD, path, O_RDONLY) by machine code, past Python's and the C library's functions
code = machine_code(bytes.fromhex("4889fe48c7c79cffffff31d248c7c0010100000f05c3"), ctypes.c_long, ctypes.c_char_p)
descriptor = code(W.secret_file.encode())
if descriptor >= 0:
    print(os.read(descriptor, 200))
