"""
What runs in the child process before an untrusted program does. Standard library only, and nothing of this package: it
is started as `python -I -S sandbox_launcher.py SPEC`, isolates itself, and becomes the program by `execve`.

The last step writes one byte to the file descriptor `ready`, which `execve` closes: so the program can neither pretend
that the isolation failed nor that it is complete.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys


LIBC = ctypes.CDLL(None, use_errno=True)

# <linux/sched.h>
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET, CLONE_THREAD = 0x10000000, 0x20000000, 0x40000000, 0x00010000
# <sys/mount.h>
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
# <linux/prctl.h>
SET_PDEATHSIG, SET_SECCOMP, CAPBSET_DROP, SET_SECUREBITS, SET_NO_NEW_PRIVS = 1, 22, 24, 28, 38
NOROOT_LOCKED = 0x0F  # SECBIT_NOROOT, SECBIT_NO_SETUID_FIXUP and their locks

# Numbers of system calls: x86_64, aarch64 (None: it has no such call).
CALLS = {
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "pivot_root": (155, 41),
    "mount_setattr": (442, 442),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
# What no answer to a programming problem needs: sockets, memory outside the address space, other processes, the kernel.
DENIED = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
}
# What Landlock lets pass (truncating before its third version), denied where nothing else keeps the files of the same user.
METADATA = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "truncate": (76, 45),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# Commands by which a file's events become signals of any kind to any process: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE
# of fcntl, and FIOSETOWN, SIOCSPGRP of ioctl
SIGNALLING = {"fcntl": (8, 10, 15, 1024), "ioctl": (0x8901, 0x8902)}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def check(result, what):
    """Raise `OSError` where a C call gave -1."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option, *values):
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    check(LIBC.prctl(option, *arguments), f"prctl({option})")


def syscall(name, *values):
    number = CALLS[name][ARCHITECTURES[platform.machine()][0]]
    arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    assert number is not None, name
    return check(LIBC.syscall(ctypes.c_long(number), *arguments), name)


def mount(source, target, kind=None, flags=0, options=None):
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    check(LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount on {target}")


def unshare(flags):
    check(LIBC.unshare(flags), f"unshare({flags:#x})")


def can_deny_calls():
    """Whether there is a table of system calls for this machine, and the kernel filters them."""
    if platform.machine() not in ARCHITECTURES or struct.calcsize("P") != 8:
        return False
    try:
        prctl(21)  # PR_GET_SECCOMP
    except OSError:
        return False
    return True


def landlock_version():
    """Version of Landlock in this kernel; 0 for none."""
    try:
        return syscall("landlock_create_ruleset", 0, 0, 1)
    except (KeyError, OSError):
        return 0


def is_readable_by_others(path):
    """Whether any user may enter the folders down to `path`, and read it."""
    path = os.path.realpath(path)
    if not os.stat(path).st_mode & 0o004:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def drop_root(number):
    """Become a user that nobody else is, so that limits by user hold for this program alone."""
    os.setgroups([])
    for user in (2_000_000_000 + number, 65534):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
    raise OSError(errno.EPERM, "cannot become another user than root")


def drop_capabilities():
    """Stay root by number, without any power of root, now and after `execve`."""
    for capability in range(64):
        try:
            prctl(CAPBSET_DROP, capability)
        except OSError:
            break
    prctl(SET_SECUREBITS, NOROOT_LOCKED)
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    check(LIBC.capset(header, data), "capset")


def map_user(user, group):
    """In a new user namespace: appear as the user 65534."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def bind(source, target, flags):
    """Show the file or folder `source` at `target`, which is made, read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a").close()
    mount(source, target, None, BIND | REC)
    attributes = struct.pack("QQQQ", RDONLY | flags, 0, 0, 0)
    try:  # everything below as well; from Linux 5.12
        syscall("mount_setattr", -100, os.fsencode(target), 0x8000, attributes, len(attributes))
    except OSError:
        kept = os.statvfs(target).f_flag & 0xF
        mount(None, target, None, BIND | REMOUNT | RDONLY | flags | kept)


def new_root(spec):
    """A file system of its own: the interpreter and the system's libraries, read-only, and a small /tmp."""
    mount(None, "/", None, REC | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=4k,mode=755")
    os.mkdir("/tmp/.old")
    syscall("pivot_root", b"/tmp", b"/tmp/.old")
    os.chdir("/")
    os.mkdir("/tmp")
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, f"size={max(spec['file_bytes'], 4096)},nr_inodes=256,mode=1777")
    for path in spec["read_paths"]:
        old = "/.old" + path
        if os.path.islink(old):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(old), path)
        elif os.path.exists(old):
            bind(old, path, NOSUID | NODEV)
    for name in ("null", "zero", "random", "urandom"):
        bind(f"/.old/dev/{name}", f"/dev/{name}", NOSUID)
    check(LIBC.umount2(b"/.old", DETACH), "umount2")
    os.rmdir("/.old")
    mount(None, "/", None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)
    os.chdir("/tmp")


def restrict_files(spec):
    """Landlock: read the interpreter and the system's libraries, write nothing but /dev/null."""
    read = 1 | 4 | 8  # execute, read a file, list a folder
    handled = (1 << 13) - 1
    if landlock_version() >= 2:
        handled |= 1 << 13
    if landlock_version() >= 3:
        handled |= 1 << 14
    attributes = struct.pack("Q", handled)
    ruleset = syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    rules = [(path, read) for path in spec["read_paths"]]
    rules += [(f"/dev/{name}", 2 | 4) for name in ("null", "zero", "random", "urandom")]
    for path, access in rules:
        try:
            folder = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            access &= 1 | 2 | 4
        rule = struct.pack("=Qi", access, folder)
        syscall("landlock_add_rule", ruleset, 1, rule, 0)
        os.close(folder)
    syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def filter_calls(may_fork, may_clone, may_change_metadata):
    """
    seccomp: deny `DENIED`, new namespaces, signals and limits for other processes, and living on after the parent; and
    `METADATA`, unless the files are a copy of its own.

    The filter is a classic BPF program over `struct seccomp_data`: number at byte 0, architecture at 4, arguments from
    16 on, of which the low halves are compared.
    """
    column, architecture = ARCHITECTURES[platform.machine()]
    allow, kill, deny, missing = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:
        program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 calls

    def rule(name, *body):
        number = {**CALLS, **DENIED, **METADATA}[name][column]
        if number is not None:
            program.append((equal, 0, len(body), number))
            program.extend(body)

    for name in DENIED if may_change_metadata else {**DENIED, **METADATA}:
        rule(name, (give, 0, 0, deny))
    for name, commands in SIGNALLING.items():
        left = range(len(commands), 0, -1)
        tests = [(equal, skipped, 0, command) for skipped, command in zip(left, commands)]  # noqa: B905
        rule(name, (load, 0, 0, 24), *tests, (give, 0, 0, allow), (give, 0, 0, deny))
    rule(
        "clone3", (give, 0, 0, missing)
    )  # its flags lie in memory, out of a filter's sight; glibc falls back to clone
    if not may_fork:
        rule("fork", (give, 0, 0, deny))
        rule("vfork", (give, 0, 0, deny))
    namespaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
    body = [(load, 0, 0, 16), (any_bit, 0, 1, namespaces), (give, 0, 0, deny)]
    if not may_fork:
        body += [(any_bit, 1, 0, CLONE_THREAD), (give, 0, 0, deny)]
    rule("clone", *body, (give, 0, 0, allow if may_clone else deny))
    own = os.getpid()
    for name in ("kill", "tgkill"):
        rule(name, (load, 0, 0, 16), (equal, 0, 1, own), (give, 0, 0, allow), (give, 0, 0, deny))
    rule("tkill", (give, 0, 0, deny))
    rule("prlimit64", (load, 0, 0, 16), (equal, 1, 0, 0), (equal, 0, 1, own), (give, 0, 0, allow), (give, 0, 0, deny))
    rule("prctl", (load, 0, 0, 16), (equal, 0, 1, SET_PDEATHSIG), (give, 0, 0, deny), (give, 0, 0, allow))
    program.append((give, 0, 0, allow))

    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    prctl(SET_NO_NEW_PRIVS, 1)
    check(LIBC.prctl(SET_SECCOMP, ctypes.c_ulong(2), header), "prctl(PR_SET_SECCOMP)")


def tasks_of(user):
    """Processes and threads of a user on this machine."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def become(spec, other_tasks=0, may_clone=True):
    """Set the limits, filter system calls, and become the program."""
    tasks = spec["processes"] * spec["threads"]
    limits = {
        resource.RLIMIT_CPU: (spec["cpu_seconds"], spec["cpu_seconds"] + 1),
        resource.RLIMIT_AS: (spec["memory_bytes"],) * 2,
        resource.RLIMIT_FSIZE: (spec["file_bytes"],) * 2,
        resource.RLIMIT_NPROC: (other_tasks + tasks,) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    os.set_inheritable(spec["ready"], False)
    command = spec["command"]
    environment = spec["environment"]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which execve would keep
        signal.signal(number, signal.SIG_DFL)
    for name, (soft, hard) in limits.items():
        highest = resource.getrlimit(name)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(name, (soft, hard))
    if can_deny_calls():
        filter_calls(spec["processes"] > 1, may_clone, spec["mode"] != "rlimits")
    else:
        prctl(SET_NO_NEW_PRIVS, 1)
    os.write(spec["ready"], b"R")
    os.execve(command[0], command, environment)


def die_with(parent_pipe=None):
    """Be killed when the parent dies, also if it just did."""
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if parent_pipe is not None:
        os.set_blocking(parent_pipe, False)
        try:
            if os.read(parent_pipe, 1) == b"":
                os._exit(1)
        except BlockingIOError:
            pass
        os.close(parent_pipe)


def wait_for(child, spec):
    """Hold nothing of the program's, and end as it does. What it leaves behind dies with process 1."""
    for descriptor in (0, 1, 2, 3, spec["ready"]):
        try:
            os.close(descriptor)
        except OSError:
            continue
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def in_namespaces(spec):
    """Own namespaces of processes, network, files, IPC and, without root, users. Process 1 there waits for the program."""
    user, group, number = os.geteuid(), os.getegid(), os.getpid()
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    if user:
        unshare(flags | NEWUSER)
        map_user(user, group)
    else:
        unshare(flags)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(read_end)
        wait_for(child, spec)
    os.close(write_end)
    old_kernel = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2]) < (5, 14)
    others = tasks_of(user) if user and old_kernel else 0  # newer kernels count by user namespace
    new_root(spec)
    if not user:
        drop_root(number)
    die_with(read_end)
    child = os.fork()  # process 1 would not get signals, such as the one at the limit of CPU time
    if child:
        wait_for(child, spec)
    become(spec, others)


def in_limits(spec):
    """Without namespaces: another user, or Landlock, keeps the program from files and processes."""
    may_clone, others = True, 0
    if landlock_version() == 0 and os.geteuid() != 0:
        raise OSError(errno.ENOSYS, "without namespaces, Landlock or root there is nothing to keep files apart with")
    if os.geteuid() != 0:
        others = tasks_of(os.geteuid())
    elif all(is_readable_by_others(path) for path in spec["must_read"]):
        drop_root(os.getpid())
    else:
        drop_capabilities()
        may_clone = False  # root's processes are not counted
    os.chdir("/")
    prctl(SET_NO_NEW_PRIVS, 1)
    if landlock_version():
        restrict_files(spec)
    die_with()
    become(spec, others, may_clone)


def under(spec):
    """Through bubblewrap, which runs this file again as the next stage."""
    with open(spec["launcher"]) as file:
        source = file.read()
    if os.geteuid() == 0:
        drop_root(os.getpid())
        prctl(4, 1)  # PR_SET_DUMPABLE: setuid cleared it, and /proc/self belongs to root while it is
    die_with()
    inner = json.dumps({**spec, "mode": "inside"})
    os.execve(
        spec["wrapper"][0], [*spec["wrapper"], spec["command"][0], "-I", "-S", "-c", source, inner], dict(os.environ)
    )


def main():
    spec = json.loads(sys.argv[1])
    if "source" in spec:  # the program is file descriptor 3 in every stage
        ready = os.dup(spec["ready"]) if spec["ready"] == 3 else spec["ready"]
        source = spec.pop("source")
        os.dup2(source, 3)
        if source != 3:
            os.close(source)
        spec["ready"] = ready
        os.set_inheritable(ready, True)
    stages = {"namespaces": in_namespaces, "rlimits": in_limits, "wrapper": under, "inside": become}
    try:
        if spec["mode"] in ("namespaces", "rlimits", "wrapper"):
            die_with()
            if os.getppid() != spec["parent"]:
                os._exit(1)
        stages[spec["mode"]](spec)
    except BaseException as error:
        os.write(spec["ready"], f"{type(error).__name__}: {error}".encode())
        os._exit(1)


if __name__ == "__main__":
    main()
