//! The guest's root file system: two archives that the kernel unpacks one over the other.
//!
//! The base holds the usual tools, with the libraries that `ldd` names, and the kernel's modules. It is made
//! once for a kernel and these tools. The additions are made for each run.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail};
use weft_bench::sandbox::progress::step;

use super::kernel::{Kernel, module_name};
use super::libraries::{is_program, libraries};
use super::{cache_directory, locked, make_directory, run, scratch};

/// Process 1 of the guest, and a stand-in for a program on a disk.
const PROGRAMS_OF_OURS: [(&str, &str); 2] =
    [("init", include_str!("init.sh")), ("usr/local/bin/tshark", super::tools::WRAPPER)];

/// Debian packages whose programs every guest has.
const PACKAGES: [&str; 22] = [
    "bash",
    "coreutils",
    "diffutils",
    "ethtool",
    "findutils",
    "grep",
    "gzip",
    "hostname",
    "iperf3",
    "iproute2",
    "iptables",
    "iputils-ping",
    "jq",
    "kmod",
    "mount",
    "nftables",
    "procps",
    "sed",
    "socat",
    "tar",
    "tcpdump",
    "util-linux",
];
/// Packages whose programs a guest has if this machine has them.
const OPTIONAL_PACKAGES: [&str; 10] = [
    "bsdutils",
    "dash",
    "libc-bin",
    "ncurses-bin",
    "openssl",
    "openvpn",
    "psmisc",
    "qperf",
    "strace",
    "wireguard-tools",
];
/// Programs under names of Debian's alternatives, and those without a package.
const MORE_PROGRAMS: [&str; 6] =
    ["awk", "ip6tables", "ip6tables-save", "iptables", "iptables-save", "which"];
/// Data of the programs besides their libraries.
const DATA: [&str; 10] = [
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/openssl.cnf",
    "/usr/lib/ssl/openssl.cnf",
    "/usr/lib/x86_64-linux-gnu/faketime",
    "/usr/lib/x86_64-linux-gnu/tc",
    "/usr/lib/x86_64-linux-gnu/xtables",
    "/usr/share/iproute2",
    "/etc/iproute2",
    "/lib/terminfo",
];
/// Parts of the kernel whose modules every guest has, under `lib/modules/RELEASE/kernel`.
const MODULE_FOLDERS: [&str; 22] = [
    "arch/x86/crypto",
    "crypto",
    "drivers/net/ovpn",
    "drivers/net/vxlan",
    "drivers/net/wireguard",
    "drivers/vhost",
    "drivers/virtio",
    "lib/crypto",
    "net/802",
    "net/8021q",
    "net/bridge",
    "net/core",
    "net/ipv4",
    "net/ipv6",
    "net/key",
    "net/netfilter",
    "net/openvswitch",
    "net/packet",
    "net/sched",
    "net/unix",
    "net/xdp",
    "net/xfrm",
];
/// Single modules besides.
const MODULES: [&str; 15] = [
    "dummy",
    "ext4",
    "geneve",
    "ifb",
    "ipvlan",
    "macvlan",
    "macvtap",
    "netlink_diag",
    "nlmon",
    "overlay",
    "tun",
    "veth",
    "virtio_blk",
    "virtio_console",
    "vrf",
];
/// Places that are links where `/usr` is merged, as Debian has it.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
/// Folders that the guest needs, empty or not.
const FOLDERS: [&str; 16] = [
    "dev",
    "etc",
    "out",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "usr/bin",
    "usr/lib",
    "usr/lib64",
    "usr/local/bin",
    "usr/sbin",
    "var/lib",
    "vm/tools",
    "var/log",
];
const ETC: [(&str, &str); 4] = [
    ("etc/passwd", "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("etc/hosts", "127.0.0.1 localhost guest\n::1 localhost guest\n"),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files\nprotocols: files\nservices: files\n",
    ),
];

/// The additions of a run to the base.
#[derive(Debug, Clone, Default)]
pub(crate) struct Additions {
    /// Files and folders of this machine, and their places in the guest.
    pub(crate) files: Vec<(PathBuf, PathBuf)>,
    /// Texts, by their place in the guest.
    pub(crate) texts: Vec<(PathBuf, String)>,
}

/// The base image for a kernel; made if there is none for exactly these tools.
pub(crate) fn base(kernel: &Kernel) -> anyhow::Result<PathBuf> {
    let place = cache_directory()?.join("images");
    let _lock = locked(&place)?;
    let programs = programs()?;
    let prefix = format!("base-{}-", kernel.release);
    let image = place
        .join(format!("{prefix}{:016x}.cpio", fingerprint(&programs, &DATA.map(PathBuf::from))?));
    if image.exists() {
        return Ok(image);
    }
    step(&format!("making the base image for {}", kernel.release));
    let start = Instant::now();
    let tree = scratch()?;
    let root = Tree(tree.path().to_owned());
    root.skeleton()?;
    root.add_programs(&programs)?;
    for path in DATA {
        if Path::new(path).exists() {
            root.copy(Path::new(path), Path::new(path))?;
        }
    }
    root.add_modules(kernel)?;
    for (path, text) in PROGRAMS_OF_OURS {
        root.write(Path::new(path), text)?;
        std::fs::set_permissions(root.0.join(path), std::fs::Permissions::from_mode(0o755))?;
    }
    for entry in std::fs::read_dir(&place)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    root.pack(&image)?;
    let bytes = std::fs::metadata(&image)?.len();
    step(&format!("made in {:.1} s: {} MB", start.elapsed().as_secs_f64(), bytes / 1_000_000));
    Ok(image)
}

/// The archive with a run's additions, libraries included.
pub(crate) fn additions(additions: &Additions, image: &Path) -> anyhow::Result<()> {
    let tree = scratch()?;
    let root = Tree(tree.path().to_owned());
    let mut programs = Vec::new();
    for (from, to) in &additions.files {
        root.copy(from, to)?;
        if is_program(from) {
            programs.push(from.clone());
        }
    }
    for library in libraries(&programs)? {
        root.copy(&library, &library)?;
    }
    for (path, text) in &additions.texts {
        root.write(path, text)?;
    }
    root.pack(image)
}

/// A folder that becomes an archive.
struct Tree(PathBuf);

impl Tree {
    fn skeleton(&self) -> anyhow::Result<()> {
        for folder in FOLDERS {
            make_directory(&self.0.join(folder))?;
        }
        for name in MERGED {
            symlink(format!("usr/{name}"), self.0.join(name))?;
        }
        symlink("/run", self.0.join("var/run"))?;
        for (path, text) in ETC {
            self.write(Path::new(path), text)?;
        }
        Ok(())
    }

    fn add_programs(&self, programs: &[PathBuf]) -> anyhow::Result<()> {
        let mut real = BTreeSet::new();
        for program in programs {
            let target = program.canonicalize()?;
            self.copy(&target, &target)?;
            if &target != program && !self.inside(program).exists() {
                make_directory(self.inside(program).parent().unwrap_or(&self.0))?;
                symlink(&target, self.inside(program))?;
            }
            real.insert(target);
        }
        let real: Vec<PathBuf> = real.into_iter().collect();
        for library in libraries(&real)? {
            self.copy(&library, &library)?;
        }
        Ok(())
    }

    fn add_modules(&self, kernel: &Kernel) -> anyhow::Result<()> {
        let release = &kernel.release;
        let source = kernel.directory()?.join("lib/modules").join(release);
        let target = self.0.join("usr/lib/modules").join(release);
        let index = std::fs::read_to_string(source.join("modules.dep"))?;
        for path in selected(&index) {
            let to = target.join(&path);
            make_directory(to.parent().unwrap_or(&target))?;
            std::fs::copy(source.join(&path), &to)?;
            // Unpacked here once instead of slowly in every guest.
            if path.ends_with(".xz") {
                run(Command::new("xz").arg("-d").arg(&to))?;
            }
        }
        for name in ["modules.order", "modules.builtin", "modules.builtin.modinfo"] {
            if source.join(name).exists() {
                std::fs::copy(source.join(name), target.join(name))?;
            }
        }
        run(Command::new("depmod").arg("-b").arg(&self.0).arg(release))?;
        Ok(())
    }

    /// A place in the guest, as Debian's merged `/usr` maps it.
    fn inside(&self, path: &Path) -> PathBuf {
        let path = path.strip_prefix("/").unwrap_or(path);
        let first = path.iter().next().and_then(|name| name.to_str()).unwrap_or_default();
        if MERGED.contains(&first) { self.0.join("usr").join(path) } else { self.0.join(path) }
    }

    fn copy(&self, from: &Path, to: &Path) -> anyhow::Result<()> {
        let to = self.inside(to);
        if to.is_file() {
            return Ok(());
        }
        make_directory(to.parent().unwrap_or(&self.0))?;
        if from.is_dir() {
            run(Command::new("cp").args(["-rLT", "--"]).arg(from).arg(to))?;
            return Ok(());
        }
        std::fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    }

    fn write(&self, path: &Path, text: &str) -> anyhow::Result<()> {
        let path = self.inside(path);
        make_directory(path.parent().unwrap_or(&self.0))?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Packs the folder, as root's, and puts the archive in place whole. Not compressed: an emulated
    /// processor takes two seconds more to unpack 80 MB than to take them as they are.
    fn pack(&self, image: &Path) -> anyhow::Result<()> {
        const PACK: &str = r#"set -o pipefail; cd "$1" || exit
            find . -mindepth 1 -print0 | LC_ALL=C sort -z | cpio --quiet -0 -o -H newc -R 0:0 >"$2""#;
        let fresh = image.with_extension(format!("new-{}", std::process::id()));
        run(Command::new("bash").args(["-c", PACK, "pack"]).arg(&self.0).arg(&fresh))?;
        std::fs::rename(&fresh, image).with_context(|| format!("cannot make {}", image.display()))
    }
}

/// The programs of the packages, by their full names.
fn programs() -> anyhow::Result<Vec<PathBuf>> {
    let list = |package: &str| {
        let output = Command::new("dpkg-query").env("LC_ALL", "C").args(["-L", package]).output();
        let output = output.context("cannot start dpkg-query: the VM lab needs Debian 12 or 13")?;
        let text =
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned());
        anyhow::Ok(text)
    };
    let mut lists = Vec::new();
    let mut missing = Vec::new();
    for package in PACKAGES {
        match list(package)? {
            Some(text) => lists.push(text),
            None => missing.push(package),
        }
    }
    if !missing.is_empty() {
        bail!("packages are missing: apt-get install {}", missing.join(" "));
    }
    for package in OPTIONAL_PACKAGES {
        lists.extend(list(package)?);
    }
    let mut found: BTreeSet<PathBuf> = BTreeSet::new();
    for path in lists.iter().flat_map(|text| text.lines()).map(Path::new) {
        let folder = path.parent().and_then(Path::to_str).unwrap_or_default();
        if ["/bin", "/sbin", "/usr/bin", "/usr/sbin"].contains(&folder) && path.is_file() {
            found.insert(path.to_owned());
        }
    }
    for name in MORE_PROGRAMS {
        let places = ["/usr/bin", "/usr/sbin"].map(|folder| Path::new(folder).join(name));
        found.extend(places.into_iter().filter(|path| path.is_file()));
    }
    Ok(found.into_iter().collect())
}

/// A hash of everything that the base image depends on.
fn fingerprint(programs: &[PathBuf], data: &[PathBuf]) -> anyhow::Result<u64> {
    let mut hasher = DefaultHasher::new();
    (PROGRAMS_OF_OURS, MODULE_FOLDERS, MODULES, FOLDERS, ETC).hash(&mut hasher);
    for program in programs {
        note_file(program, &mut hasher)?;
    }
    for place in data.iter().filter(|place| place.exists()) {
        note_data(place, &mut hasher)?;
    }
    Ok(hasher.finish())
}

fn note_file(path: &Path, hasher: &mut DefaultHasher) -> anyhow::Result<()> {
    let about = std::fs::metadata(path)?;
    (path, about.len(), about.modified()?).hash(hasher);
    Ok(())
}

/// A file, or a folder with all that is in it.
fn note_data(path: &Path, hasher: &mut DefaultHasher) -> anyhow::Result<()> {
    if !path.is_dir() {
        return note_file(path, hasher);
    }
    let entries: Result<BTreeSet<PathBuf>, _> =
        std::fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.path())).collect();
    path.hash(hasher);
    // A link may lead nowhere.
    let mut entries = entries?.into_iter().filter(|entry| entry.exists());
    entries.try_for_each(|entry| note_data(&entry, hasher))
}

/// The files of the guest's modules in a `modules.dep`, with all their dependencies.
fn selected(index: &str) -> Vec<String> {
    let entries: BTreeMap<&str, &str> =
        index.lines().filter_map(|line| line.split_once(':')).collect();
    let wanted = |path: &str| {
        let part = path.strip_prefix("kernel/").unwrap_or(path);
        let under =
            |folder: &str| part.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        MODULE_FOLDERS.into_iter().any(under) || MODULES.contains(&module_name(path).as_str())
    };
    let mut found = BTreeSet::new();
    for (path, depends) in entries.iter().filter(|(path, _)| wanted(path)) {
        // depmod lists what a module needs in full, not only the next step.
        found.insert(*path);
        found.extend(depends.split_whitespace());
    }
    found.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_module_brings_what_it_depends_on_and_nothing_else() {
        let index = "kernel/drivers/net/veth.ko.xz:\n\
            kernel/net/openvswitch/openvswitch.ko.xz: kernel/net/nsh/nsh.ko.xz kernel/lib/libcrc32c.ko.xz\n\
            kernel/net/nsh/nsh.ko.xz:\nkernel/lib/libcrc32c.ko.xz:\nkernel/net/wireless/cfg80211.ko.xz:\n\
            kernel/net/ipv4x/no.ko:\nkernel/drivers/vhost/vhost-net.ko: kernel/drivers/vhost/vhost.ko\n\
            kernel/drivers/vhost/vhost.ko:\n";
        let wanted = [
            "kernel/drivers/net/veth.ko.xz",
            "kernel/drivers/vhost/vhost-net.ko",
            "kernel/drivers/vhost/vhost.ko",
            "kernel/lib/libcrc32c.ko.xz",
            "kernel/net/nsh/nsh.ko.xz",
            "kernel/net/openvswitch/openvswitch.ko.xz",
        ];
        assert_eq!(selected(index), wanted);
    }

    #[test]
    fn an_image_without_what_has_come_since_serves_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let data = [folder.path().join("faketime")];
        let now = || fingerprint(&[PathBuf::from("/bin/bash")], &data).unwrap();
        let mut seen = BTreeSet::from([now()]);
        std::fs::create_dir_all(data[0].join("deeper")).unwrap();
        assert!(seen.insert(now()), "a folder");
        assert!(!seen.insert(now()));
        let file = data[0].join("deeper/library.so");
        std::fs::write(&file, "1").unwrap();
        assert!(seen.insert(now()), "a file");
        std::fs::write(&file, "12").unwrap();
        assert!(seen.insert(now()), "another file");
        std::os::unix::fs::symlink("nowhere", data[0].join("link")).unwrap();
        assert!(!seen.insert(now()), "a link that leads nowhere");
    }

    #[test]
    fn links_of_a_merged_usr_lead_to_one_place() {
        let tree = Tree(PathBuf::from("/tree"));
        assert_eq!(tree.inside(Path::new("/lib/x/y.so")), Path::new("/tree/usr/lib/x/y.so"));
        assert_eq!(tree.inside(Path::new("/usr/lib/x/y.so")), Path::new("/tree/usr/lib/x/y.so"));
        assert_eq!(tree.inside(Path::new("root/file")), Path::new("/tree/root/file"));
    }
}
