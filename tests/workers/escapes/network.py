# %% connect to a server on this machine
# proof: plain
connection = socket.create_connection(("127.0.0.1", W.tcp), 1)
connection.sendall(b"hello")
show_secrets(connection.recv(200))

# %% connect over IPv6
# proof: machine
connection = socket.create_connection(("::1", W.tcp6), 1)
show_secrets(connection.recv(200))

# %% fetch a page
# proof: plain
import urllib.request
print(urllib.request.urlopen(f"http://127.0.0.1:{W.tcp}/", timeout=1).read())

# %% send a datagram
# proof: plain
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"hello", ("127.0.0.1", W.udp))

# %% ask for a name, with the secret in the question
# proof: plain
question = b"\x12\x34\x01\x00\x00\x01\0\0\0\0\0\0" + b"\x07escaped\x07example\x03com\0" + b"\0\x01\0\x01"
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(question, ("127.0.0.1", W.udp))

# %% a connection that sends its data with the first packet
# proof: no, the kernel's setting decides
link = socket.socket()
link.sendto(b"hello", 0x20000000, ("127.0.0.1", W.tcp))  # MSG_FASTOPEN

# %% a raw packet
# proof: root
packet = struct.pack("!BBHHHBBH4s4s", 69, 0, 0, 0, 0, 64, 17, 0, bytes([127, 0, 0, 1]), bytes([127, 0, 0, 1]))
packet += struct.pack("!HHHH", 40000, W.udp, 13, 0) + b"hello"
socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).sendto(packet, ("127.0.0.1", 0))

# %% listen to all packets
# proof: root
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
others = [name for _, name in socket.if_nameindex() if name != "lo"]
if others:
    won(others)

# %% the machine's network cards
# proof: machine
others = [name for _, name in socket.if_nameindex() if name != "lo"] + [n for n in os.listdir("/sys/class/net") if n != "lo"]
if others:
    won(others)

# %% the machine's routes and connections
# proof: plain
for name in ("tcp", "udp"):
    with quiet():
        if f":{W.tcp:04X} " in open(f"/proc/net/{name}").read():
            won(name)

# %% talk to the kernel's network configuration
# proof: root
link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
link.settimeout(1)
link.sendto(struct.pack("=IHHII", 17, 18, 0x301, 1, 0) + b"\0", (0, 0))  # RTM_GETLINK, dump
answer = link.recv(1 << 16)
if b"eth" in answer or b"ens" in answer or b"enp" in answer or b"ifb" in answer or b"docker" in answer:
    won("the machine's links")

# %% a server that others can reach
# proof: plain
server = socket.create_server(("127.0.0.1", W.free_port))
link = socket.create_connection(("127.0.0.1", W.tcp), 1)
won("listens beside the machine's servers")

# %% talk to the machine below this one
# proof: machine
link = socket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK
link.settimeout(0.2)
link.bind((0xFFFFFFFF, 0xFFFFFFFF))
won("bound a socket to the hypervisor")

# %% ask the kernel for cryptography
# proof: machine
link = socket.socket(38, socket.SOCK_SEQPACKET)  # AF_ALG
link.bind(("hash", "sha256"))
won("AF_ALG, a source of kernel bugs")

# %% rare kinds of sockets
# proof: no, which are loaded differs
for family in (3, 4, 5, 9, 15, 17, 18, 19, 20, 21, 22, 23, 24, 26, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45):
    for kind in (1, 2, 3, 5):
        with quiet():
            socket.socket(family, kind).close()
            won(f"family {family}, type {kind}")

# %% join the machine's network namespace
# proof: root
for pid in (W.parent, os.getppid(), 1):
    with quiet():
        descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        if call("setns", descriptor, NEWNET) == 0:
            socket.create_connection(("127.0.0.1", W.tcp), 1)

# %% a packet from a new network namespace
# proof: no, a new one is empty
call("unshare", NEWUSER | NEWNET)
with quiet():
    import fcntl
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(link, 0x8914, struct.pack("16sh22x", b"lo", 0x49))  # SIOCSIFFLAGS: up
    won("set up an interface")
