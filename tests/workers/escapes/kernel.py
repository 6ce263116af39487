# %% rings for input and output
# proof: machine
if call("io_uring_setup", 4, ctypes.create_string_buffer(120)) >= 0:
    won("io_uring")

# %% programs in the kernel
# proof: root
attributes = struct.pack("IIII", 2, 4, 4, 1) + bytes(112)  # an array map
if call("bpf", 0, attributes, 128) >= 0:
    won("bpf")

# %% a socket filter in the kernel
# proof: root
instructions = struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
code, licence = ctypes.create_string_buffer(instructions), ctypes.create_string_buffer(b"GPL")
attributes = struct.pack("=IIQQ", 1, 2, ctypes.addressof(code), ctypes.addressof(licence)) + bytes(104)
if call("bpf", 5, attributes, 128) >= 0:
    won("loaded a program")

# %% a key in a keyring
# proof: machine
if call("add_key", b"user", W.marker.encode(), b"x", 1, -2) >= 0:  # the process's keyring
    won("add_key")

# %% the keys of the session
# proof: machine
if call("keyctl", 0, -3, 1, 0, 0) >= 0:  # the session's keyring
    won("keyctl")

# %% a key asked from user space
# proof: machine
if call("request_key", b"user", W.marker.encode(), None, 0) >= 0 or ctypes.get_errno() == errno.ENOKEY:
    won("request_key")

# %% faults handled by the program
# proof: machine
if call("userfaultfd", 1) >= 0 or call("userfaultfd", 0) >= 0:
    won("userfaultfd")

# %% faults handled by the program, through the device
# proof: machine
import fcntl
device = os.open("/dev/userfaultfd", os.O_RDWR)
if fcntl.ioctl(device, 0xAA00, 0) >= 0:
    won("userfaultfd")

# %% counters of the processor
# proof: machine
attributes = bytearray(128)
struct.pack_into("=IIQ", attributes, 0, 1, 128, 1)  # a software counter of this process
struct.pack_into("=Q", attributes, 40, 1 << 5 | 1 << 6)  # without kernel and hypervisor
if call("perf_event_open", bytes(attributes), 0, -1, -1, 0) >= 0:
    won("perf_event_open")

# %% a file by its number
# proof: root
class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]
handle, mount = Handle(128), ctypes.c_int()
for path in (W.secret_file, os.__file__, "/"):
    if call("name_to_handle_at", -100, path.encode(), ctypes.byref(handle), ctypes.byref(mount), 0) == 0:
        descriptor = call("open_by_handle_at", os.open(os.path.dirname(path), os.O_RDONLY), ctypes.byref(handle), 0)
        if descriptor >= 0:
            won(path)

# %% the root of the disk by its number
# proof: no, the number of a root differs by file system
class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("inode", ctypes.c_uint), ("generation", ctypes.c_uint)]
for path in (os.__file__, "/", "/tmp", "/usr"):
    with quiet():
        descriptor = call("open_by_handle_at", os.open(path, os.O_RDONLY), ctypes.byref(Handle(8, 1, 2, 0)), os.O_PATH)
        if descriptor >= 0:
            won(os.listdir(descriptor)[:4])

# %% a module for the kernel
# proof: no, it is never tried on a machine that would take it
if W.sandboxed:
    for name, arguments in (("init_module", (b"", 0, b"")), ("finit_module", (-1, b"", 0)), ("delete_module", (b"no such module", 0))):
        call(name, *arguments)
        if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            won(f"{name} looked at its arguments")

# %% another kernel, a reboot, swap space
# proof: no, it is never tried on a machine that would do it
if W.sandboxed:
    for name, arguments in (("kexec_load", (0, 0, None, 0)), ("reboot", (0, 0, 0, None)), ("swapon", (b"/no such", 0)), ("quotactl", (0, None, 0, None))):
        call(name, *arguments)
        if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            won(f"{name} looked at its arguments: {ctypes.get_errno()}")

# %% ports of the machine
# proof: machine
if call("iopl", 3) == 0 or call("ioperm", 0x80, 1, 1) == 0:
    won("ports")

# %% the kernel's log
# proof: root
buffer = ctypes.create_string_buffer(4096)
if call("syslog", 3, buffer, 4096) > 0:
    won("syslog")

# %% the clock
# proof: no, the time would be set
moment = struct.pack("=qq", *divmod(time.time_ns(), 10**9))
if W.sandboxed and call("clock_settime", 0, moment) == 0:
    won("clock_settime")
if W.sandboxed and call("settimeofday", struct.pack("=qq", int(time.time()), 0), None) == 0:
    won("settimeofday")

# %% the name of the machine
# proof: no, it would be set
name = socket.gethostname().encode()
if W.sandboxed and call("sethostname", name, len(name)) == 0:
    won("sethostname")

# %% a realtime priority
# proof: root
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
won("SCHED_FIFO")

# %% a better priority
# proof: root
os.nice(-5)
won("nice")

# %% events of all files
# proof: root
if call("fanotify_init", 0, 0) >= 0:
    won("fanotify")

# %% watch a folder outside
# proof: plain
watch = libc.inotify_init1(os.O_NONBLOCK)
if libc.inotify_add_watch(watch, W.outside.encode(), 0xFFF) >= 0:
    won("watches a folder outside")

# %% pages moved between nodes
# proof: machine
if call("migrate_pages", W.parent, 64, struct.pack("Q", 1), struct.pack("Q", 1)) >= 0:
    won("migrate_pages")

# %% memory that the kernel itself cannot see
# proof: machine
if call("memfd_secret", 0) >= 0:
    won("memfd_secret")

# %% asynchronous input and output of old
# proof: machine
context = ctypes.c_ulong(0)
if call("io_setup", 8, ctypes.byref(context)) == 0:
    won("io_setup")

# %% a persona without random addresses
# proof: plain
if call("personality", 0x0040000) >= 0 and call("personality", 0xFFFFFFFF) & 0x0040000:
    won("addresses are no longer random")
