# %% read a secret by its path
# proof: plain
print(open(W.secret_file).read())

# %% read a secret through many parents
# proof: plain
print(open("../" * 40 + W.secret_file.lstrip("/")).read())

# %% read a secret below the working folder that the parent has
# proof: plain
for folder, _, names in os.walk(os.getcwd()):
    for name in names[:100]:
        with quiet():
            show_secrets(open(os.path.join(folder, name), "rb").read(1 << 16))
    if folder.count("/") > 12:
        break

# %% read a secret with the C library
# proof: plain
libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(W.secret_file.encode(), b"r")
if file:
    buffer = ctypes.create_string_buffer(200)
    libc.fgets(buffer, 200, ctypes.c_void_p(file))
    show_secrets(buffer.raw)

# %% read a secret with cat
# proof: plain
print(subprocess.run(["cat", W.secret_file], capture_output=True, text=True).stdout)

# %% read a secret with a shell
# proof: plain
print(os.popen(f"/bin/sh -c 'while read line; do echo $line; done < {W.secret_file}'").read())

# %% read a secret as a module
# proof: plain
import importlib.util
spec = importlib.util.spec_from_file_location("secret", W.secret_module)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.SECRET)

# %% read a secret as a line of a traceback
# proof: plain
exec(compile("1/0", W.secret_file, "exec"))

# %% read a secret with linecache
# proof: plain
import linecache
print(linecache.getlines(W.secret_file))

# %% read a secret with numpy
# proof: plain
import numpy
show_secrets(numpy.fromfile(W.secret_file, dtype=numpy.uint8).tobytes())

# %% map a secret into memory
# proof: plain
descriptor = os.open(W.secret_file, os.O_RDONLY)
show_secrets(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)[:])

# %% read a secret with sendfile
# proof: plain
source = os.open(W.secret_file, os.O_RDONLY)
inside, outside = os.pipe()
os.splice(source, outside, 200)
show_secrets(os.read(inside, 200))

# %% attach a database outside
# proof: plain
import sqlite3
connection = sqlite3.connect("file:" + W.database + "?mode=ro&immutable=1", uri=True)
print(connection.execute("select * from kept").fetchall())

# %% walk from a folder that was opened by descriptor
# proof: plain
root = os.open("/", os.O_PATH)
for part in W.secret_file.strip("/").split("/")[:-1]:
    root = os.open(part, os.O_PATH, dir_fd=root)
print(os.read(os.open("secret.txt", os.O_RDONLY, dir_fd=root), 200))

# %% open with openat2 and magic links
# proof: plain
class How(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]
for path in (W.secret_file, "/proc/self/root" + W.secret_file):
    descriptor = call("openat2", -100, path.encode(), ctypes.byref(How()), 24)
    if descriptor >= 0:
        print(os.read(descriptor, 200))

# %% read the machine's password hashes
# proof: root
won(open("/etc/shadow").read()[:5])

# %% list the homes
# proof: plain
for home in ("/root", os.path.expanduser("~"), W.home):
    with quiet():
        names = [n for n in os.listdir(home) if n.startswith((".ssh", ".bash", ".cache", ".profile", ".python", ".git"))]
        if names:
            won(names)

# %% read keys and tokens in a home
# proof: plain
for home in {W.home, "/root", os.path.expanduser("~")}:
    for name in glob.glob(home + "/.cache/huggingface/token") + glob.glob(home + "/.ssh/id_*") + glob.glob(home + "/.netrc"):
        with quiet():
            show_secrets(open(name, "rb").read())

# %% find the secret's name anywhere
# proof: plain
seen = 0
for start in ("/tmp", "/var", "/home", "/mnt", "/srv", "/opt", "/run", "/old_root", "/oldroot", "/.old", "/newroot", "/put_old"):
    for folder, folders, names in os.walk(start):
        seen += 1
        if "secret.txt" in names:
            with quiet():
                show_secrets(open(folder + "/secret.txt", "rb").read())
        if seen > 20_000:
            break

# %% sniff where the root was before the new one was mounted
# proof: no, a plain program has the machine's root
for old in ("/old_root", "/oldroot", "/.oldroot", "/put_old", "/.pivot", "/.old_root", "/old", "/mnt", "/host", "/proc/1/root", "/proc/self/root/.."):
    with quiet():
        show_secrets(open(old + W.secret_file, "rb").read())
