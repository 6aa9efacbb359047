"""The filter of system calls that every program runs under, assembled as classic BPF.

Denied calls fail with EPERM, so that a program ends by its own error; clone3 fails with ENOSYS, which makes libc use clone,
whose flags a filter can read. A foreign architecture's calls kill the process.
"""

from __future__ import annotations

import errno
import platform
import struct

X86, ARM = 0xC000003E, 0xC00000B7  # AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, (16, 24, 32, 40)  # offsets in struct seccomp_data; low words of the arguments
NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
UNIX_FAMILY, TIOCSTI, TIOCLINUX = 1, 0x5412, 0x541C
MAP_HUGETLB = 0x40000  # pages that a memory group does not count

# name -> (x86_64, aarch64); None: the architecture has no such call
CHECKED = {"clone": (56, 220), "clone3": (435, 435), "socketpair": (53, 199), "ioctl": (16, 29), "mmap": (9, 222)}
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes' memory and descriptors
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237),
    # kernel keys, programs in the kernel, wide or new surfaces of it
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "lookup_dcookie": (212, 18),
    "personality": (135, 92), "modify_ldt": (154, None), "uselib": (134, None), "sysfs": (139, None), "ustat": (136, None),
    # memory that no process owns
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
    # mounts, namespaces, roots, file handles
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "statmount": (457, 457), "listmount": (458, 458), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225),
    # network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # the machine
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "clock_settime": (227, 112), "settimeofday": (164, 170),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "syslog": (103, 116), "acct": (163, 89), "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip


def program(machine: str | None = None) -> bytes:
    """The filter for `machine` (platform.machine() when None): struct sock_filter after struct sock_filter, 8 bytes each.

    Raises ValueError for an architecture without a table of call numbers.
    """
    machine = machine or platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise ValueError(f"machine={machine!r} has no table of system calls; add its numbers to sandbox/seccomp.py")
    column = 0 if machine == "x86_64" else 1
    number = {name: numbers[column] for name, numbers in CHECKED.items()}
    code: list[tuple[int, int, str, str]] = [  # operation, operand, label when true, label when false; "" is the next line
        (LOAD, ARCHITECTURE, "", ""),
        (EQUAL, X86 if column == 0 else ARM, "", "kill"),
        (LOAD, NUMBER, "", ""),
        (AT_LEAST, 0x40000000, "deny", ""),  # the x32 numbers, a second name for every call
        (EQUAL, number["clone3"], "missing", ""),
        (EQUAL, number["clone"], "clone", ""),
        (EQUAL, number["socketpair"], "socketpair", ""),
        (EQUAL, number["ioctl"], "ioctl", ""),
        (EQUAL, number["mmap"], "mmap", ""),
    ]
    code += [(EQUAL, numbers[column], "deny", "") for numbers in DENIED.values() if numbers[column] is not None]
    blocks = {
        "allow": [(RETURN, ALLOW, "", "")],
        "clone": [(LOAD, ARGUMENT[0], "", ""), (ANY_BIT, NAMESPACES, "deny", "permit")],
        "socketpair": [(LOAD, ARGUMENT[0], "", ""), (EQUAL, UNIX_FAMILY, "permit", "deny")],
        "ioctl": [(LOAD, ARGUMENT[1], "", ""), (EQUAL, TIOCSTI, "deny", ""), (EQUAL, TIOCLINUX, "deny", "permit")],
        "mmap": [(LOAD, ARGUMENT[3], "", ""), (ANY_BIT, MAP_HUGETLB, "deny", "permit")],
        "permit": [(RETURN, ALLOW, "", "")],
        "deny": [(RETURN, ERRNO | errno.EPERM, "", "")],
        "missing": [(RETURN, ERRNO | errno.ENOSYS, "", "")],
        "kill": [(RETURN, KILL, "", "")],
    }
    place = {}
    for label, block in blocks.items():
        place[label] = len(code)
        code += block
    lines = []
    for here, (operation, operand, true, false) in enumerate(code):
        jumps = [place[label] - here - 1 if label else 0 for label in (true, false)]
        lines.append(struct.pack("<HBBI", operation, *jumps, operand))
    return b"".join(lines)
