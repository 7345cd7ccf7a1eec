//! Facts about the host, read without changing it: files of `/proc`, `/sys` and `/lib/modules`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The bit of CAP_NET_ADMIN (capabilities(7)).
const CAP_NET_ADMIN: u32 = 12;
/// Features of x86 and Arm processors that the data path or an AEAD uses, named as in
/// `/proc/cpuinfo`.
const FEATURES: &str = "aes pclmulqdq ssse3 avx avx2 avx512f avx512bw vaes vpclmulqdq sha_ni \
                        pmull sha2 sha3 asimd sve";

/// The processor's model name (x86), or the implementer and part numbers (Arm).
pub fn cpu_model() -> String {
    model_in(&read("/proc/cpuinfo").unwrap_or_default())
}

fn model_in(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let arm = || Some(format!("Arm {} part {}", field("CPU implementer")?, field("CPU part")?));
    field("model name").or_else(arm).unwrap_or_else(|| "unknown".to_owned())
}

/// Looks for a program in the search path and in the system directories.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
    let places = std::env::split_paths(&path).chain(system);
    places.map(|place| place.join(program)).find(|file| file.is_file())
}

/// The MTU of the link to other hosts, in bytes: as the daemon assumes it without peers.
pub(super) fn link_mtu() -> Option<u16> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let mtu = runtime
        .block_on(async { weft_kernel::Kernel::new().ok()?.default_link_mtu().await.ok()? })?;
    Some(u16::try_from(mtu).unwrap_or(u16::MAX))
}

/// Whether the kernel has a part that may be a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Module {
    /// Built in, or loaded.
    There,
    /// On disk; the kernel loads it on demand.
    OnDisk,
    /// Built as a module that is not on this disk.
    NotInstalled,
    /// Left out when the kernel was built.
    Absent,
    /// The kernel does not provide this information.
    Unknown,
}

/// Evidence of the running kernel's features.
#[derive(Debug, Default)]
pub(super) struct Kernel {
    /// Its release.
    pub(super) release: String,
    /// `modules.builtin` and `modules.dep`, if they are there.
    builtin: Option<String>,
    on_disk: Option<String>,
    /// The kernel's build configuration.
    config: Option<String>,
}

impl Kernel {
    /// Reads the available evidence.
    pub(super) fn read() -> Self {
        let release = read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned());
        let modules = PathBuf::from("/lib/modules").join(&release);
        let text = |file: &str| std::fs::read_to_string(modules.join(file)).ok();
        let config = std::fs::read_to_string(format!("/boot/config-{release}")).ok();
        Self {
            builtin: text("modules.builtin"),
            on_disk: text("modules.dep"),
            config: config.or_else(|| text("config")).or_else(packed_config),
            release,
        }
    }

    /// The state of a module, which the option `CONFIG_`… builds.
    pub(super) fn module(&self, name: &str, option: &str) -> Module {
        if Path::new("/sys/module").join(name).exists() {
            Module::There
        } else {
            self.told(name, option)
        }
    }

    fn told(&self, name: &str, option: &str) -> Module {
        let lists = |list: &Option<String>| list.as_ref().is_some_and(|list| names(list, name));
        if lists(&self.builtin) {
            return Module::There;
        }
        if lists(&self.on_disk) {
            return Module::OnDisk;
        }
        match self.config.as_ref().map(|config| setting(config, option)) {
            Some(Some("y")) => Module::There,
            Some(Some(_)) => Module::NotInstalled,
            Some(None) => Module::Absent,
            None if self.builtin.is_some() && self.on_disk.is_some() => Module::Absent,
            None => Module::Unknown,
        }
    }
}

/// Reads `/proc/config.gz`, using gzip.
fn packed_config() -> Option<String> {
    if !Path::new("/proc/config.gz").exists() {
        return None;
    }
    let output = Command::new("gzip").args(["-dc", "/proc/config.gz"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.contains("CONFIG_").then_some(text)
}

/// Whether a list of module files names this module. File names have `-` where modules have `_`.
fn names(list: &str, module: &str) -> bool {
    list.lines().any(|line| {
        let path = line.split(':').next().unwrap_or_default();
        let file = path.rsplit('/').next().unwrap_or_default();
        file.split(".ko").next().is_some_and(|stem| stem.replace('-', "_") == module)
    })
}

/// The value of an option of the kernel's configuration.
fn setting<'a>(config: &'a str, option: &str) -> Option<&'a str> {
    config.lines().find_map(|line| line.strip_prefix(option)?.strip_prefix('='))
}

/// The relevant processor features among those in `/proc/cpuinfo`.
pub(super) fn cpu_features() -> Vec<&'static str> {
    features_of(&read("/proc/cpuinfo").unwrap_or_default())
}

fn features_of(cpuinfo: &str) -> Vec<&'static str> {
    let line =
        cpuinfo.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
    let words: Vec<&str> = line
        .and_then(|line| line.split_once(':'))
        .map(|(_, words)| words.split_whitespace().collect())
        .unwrap_or_default();
    FEATURES.split(' ').filter(|feature| words.contains(feature)).collect()
}

/// Whether this process may change the network's configuration.
pub(super) fn may_change_networks() -> bool {
    has_capability(&read("/proc/self/status").unwrap_or_default(), CAP_NET_ADMIN)
}

fn has_capability(status: &str, bit: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    set.is_some_and(|set| set & (1 << bit) != 0)
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(builtin: Option<&str>, on_disk: Option<&str>, config: Option<&str>) -> Kernel {
        let text = |text: Option<&str>| text.map(str::to_owned);
        Kernel {
            release: "7.3.4".to_owned(),
            builtin: text(builtin),
            on_disk: text(on_disk),
            config: text(config),
        }
    }

    #[test]
    fn processor_names_of_x86_and_arm() {
        assert_eq!(
            model_in("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n"),
            "Some CPU @ 2 GHz"
        );
        let arm = "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
        assert_eq!(model_in(arm), "Arm 0x41 part 0xd0c");
        assert_eq!(model_in(""), "unknown");
    }

    #[test]
    fn a_module_is_found_wherever_the_kernel_tells_of_it() {
        let builtin = "kernel/drivers/net/tun.ko\nkernel/net/8021q/x-tables.ko\n";
        let on_disk = "kernel/net/ipv4/esp4.ko.xz: kernel/lib/x.ko.xz\nkernel/drivers/net/vxlan/vxlan.ko.zst:\n";
        let debian = kernel(Some(builtin), Some(on_disk), None);
        assert_eq!(debian.told("tun", "CONFIG_TUN"), Module::There);
        assert_eq!(debian.told("x_tables", "CONFIG_X"), Module::There);
        assert_eq!(debian.told("esp4", "CONFIG_INET_ESP"), Module::OnDisk);
        assert_eq!(debian.told("vxlan", "CONFIG_VXLAN"), Module::OnDisk);
        // Listed only as a dependency of another module.
        assert_eq!(debian.told("x", "CONFIG_X"), Module::Absent);
        assert_eq!(debian.told("ovpn", "CONFIG_OVPN"), Module::Absent);
        let config =
            "# CONFIG_OVPN is not set\nCONFIG_VXLAN=y\nCONFIG_VXLAN_GBP=n\nCONFIG_INET_ESP=m\n";
        let bare = kernel(None, None, Some(config));
        assert_eq!(bare.told("vxlan", "CONFIG_VXLAN"), Module::There);
        assert_eq!(bare.told("esp4", "CONFIG_INET_ESP"), Module::NotInstalled);
        assert_eq!(bare.told("ovpn", "CONFIG_OVPN"), Module::Absent);
        assert_eq!(kernel(None, None, None).told("tun", "CONFIG_TUN"), Module::Unknown);
    }

    #[test]
    fn features_of_x86_and_arm() {
        let x86 = "model name : x\nflags\t\t: fpu aes avx2 vaes avx512f\nbugs: avx\n";
        assert_eq!(features_of(x86), ["aes", "avx2", "avx512f", "vaes"]);
        assert_eq!(features_of("Features\t: fp asimd aes pmull\n"), ["aes", "pmull", "asimd"]);
        assert_eq!(features_of(""), [""; 0]);
    }

    #[test]
    fn the_capability_is_read_from_the_effective_set() {
        let status = "CapPrm:\t000001ffffffffff\nCapEff:\t0000000000001000\n";
        assert!(has_capability(status, CAP_NET_ADMIN));
        assert!(!has_capability(status, CAP_NET_ADMIN + 1));
        assert!(!has_capability("CapEff:\t0000000000000000\n", CAP_NET_ADMIN));
        assert!(!has_capability("", CAP_NET_ADMIN));
    }
}
