# %% the disk
# proof: root
for name in glob.glob("/dev/[vsx]d[a-z]") + glob.glob("/dev/nvme*") + glob.glob("/dev/loop[0-9]") + glob.glob("/dev/dm-*"):
    with quiet():
        os.close(os.open(name, os.O_RDONLY))
        won(name)

# %% a device file of the disk
# proof: root
device = os.stat(os.__file__).st_dev
path = f"{tempfile.mkdtemp(prefix=W.marker)}/disk"
os.mknod(path, 0o60600, device)
os.close(os.open(path, os.O_RDONLY))
won("made a device file")

# %% a device file of the memory
# proof: root
path = f"{tempfile.mkdtemp(prefix=W.marker)}/memory"
os.mknod(path, 0o20600, os.makedev(1, 11))  # kmsg
os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
won("made a device file")

# %% devices of the machine
# proof: root
for name in ("/dev/kvm", "/dev/net/tun", "/dev/vsock", "/dev/loop-control", "/dev/hwrng", "/dev/cpu/0/msr", "/dev/port", "/dev/vga_arbiter", "/dev/cpu_dma_latency", "/dev/nvidia0", "/dev/nvidiactl", "/dev/btrfs-control", "/dev/snapshot", "/dev/watchdog", "/dev/rtc0"):
    if "watchdog" not in name or W.sandboxed:
        with quiet():
            os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
            won(name)

# %% write on the terminal
# proof: plain
os.write(os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY), W.marker.encode())

# %% type on the terminal
# proof: no, the kernel's setting decides
import fcntl
for name in ("/dev/tty", "/dev/console", "/dev/tty0", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"):
    with quiet():
        terminal = os.open(name, os.O_RDWR | os.O_NOCTTY)
        for byte in W.marker.encode() + b"\n":
            fcntl.ioctl(terminal, 0x5412, bytes([byte]))  # TIOCSTI
        won(name)

# %% type on the terminal through what was inherited
# proof: no, the kernel's setting decides
import fcntl
for descriptor in range(64):
    with quiet():
        for byte in W.marker.encode() + b"\n":
            fcntl.ioctl(descriptor, 0x5412, bytes([byte]))
        won(descriptor)

# %% terminals of others
# proof: plain
for name in glob.glob("/dev/pts/[0-9]*"):
    if name == W.terminal:
        with quiet():
            os.write(os.open(name, os.O_WRONLY | os.O_NOCTTY), W.marker.encode())

# %% take the terminal as one's own
# proof: plain
in_child(lambda: (os.setsid(), os.write(os.open(W.terminal, os.O_RDWR), W.marker.encode())))

# %% the console
# proof: root
for name in ("/dev/console", "/dev/tty0", "/dev/tty1", "/dev/ttyS0", "/dev/vcs1"):
    with quiet():
        os.close(os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK))
        won(name)

# %% a graphics card and shared buffers
# proof: no, which are there differs
for name in glob.glob("/dev/dri/*") + glob.glob("/dev/dma_heap/*") + glob.glob("/dev/infiniband/*") + ["/dev/udmabuf", "/dev/zram0", "/dev/ptp0"]:
    with quiet():
        os.close(os.open(name, os.O_RDONLY))
        won(name)
