# %% connect to a socket in a folder
# proof: plain
link = socket.socket(socket.AF_UNIX)
link.connect(W.unix)
show_secrets(link.recv(200))

# %% send to a datagram socket in a folder
# proof: plain
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"hello", W.unix_datagram)

# %% connect to an abstract socket
# proof: plain
link = socket.socket(socket.AF_UNIX)
link.connect("\0" + W.abstract)
show_secrets(link.recv(200))

# %% send to an abstract datagram socket
# proof: plain
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"hello", "\0" + W.abstract + "-datagram")

# %% connect to every socket of the machine
# proof: plain
for line in open("/proc/net/unix").read().splitlines()[1:]:
    if W.abstract in line:
        won(line.split()[-1])

# %% sockets of well-known services
# proof: no, which run differs
for path in ("/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/systemd/private", "/run/dbus/system_bus_socket", "/tmp/.X11-unix/X0", "/run/nscd/socket", "/dev/log"):
    with quiet():
        socket.socket(socket.AF_UNIX).connect(path)
        won(path)
    with quiet():
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect(path)
        won(path)

# %% an abstract name for the next run
# proof: no, a plain program's name goes with it
left = socket.socket(socket.AF_UNIX)
left.bind("\0" + W.marker)
left.listen()
in_child(lambda: time.sleep(20), wait=False)
# --- then
link = socket.socket(socket.AF_UNIX)
link.connect("\0" + W.marker)
won("met the run before")

# %% send a descriptor of this program to a server outside
# proof: plain
link = socket.socket(socket.AF_UNIX)
link.connect(W.unix)
socket.send_fds(link, [b"take"], [os.open("/", os.O_PATH)])

# %% the servers of multiprocessing and of ray
# proof: no, which run differs
for path in glob.glob("/tmp/pymp-*/listener-*") + glob.glob("/tmp/ray/session_*/sockets/*") + glob.glob("/tmp/*/*.sock"):
    with quiet():
        socket.socket(socket.AF_UNIX).connect(path)
        won(path)
