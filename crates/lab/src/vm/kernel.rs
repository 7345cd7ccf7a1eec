//! Debian's kernels: found in its suites, fetched, and kept outside the tree.
//!
//! A kernel in the cache is used without the network. The suites are asked again after a week; if they cannot be
//! reached, the cached one serves.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use weft_bench::sandbox::progress::{note, step};

use super::apt::{Mirror, Suite};
use super::{cache_directory, locked, make_directory, run};

/// After this long the suites are asked for a newer kernel.
const REFRESH_INTERVAL_S: u64 = 7 * 24 * 3600;
/// Debian's flavours, smaller one first. The second is taken where the first lacks a module.
const METAPACKAGES: [&str; 2] = ["linux-image-cloud-amd64", "linux-image-amd64"];
/// Modules that the lab cannot do without.
const REQUIRED_MODULES: [&str; 18] = [
    "br_netfilter",
    "bridge",
    "esp4",
    "esp6",
    "ext4",
    "nf_tables",
    "nft_ct",
    "nft_xfrm",
    "openvswitch",
    "sch_netem",
    "tun",
    "veth",
    "vhost_net",
    "virtio_blk",
    "virtio_console",
    "vxlan",
    "wireguard",
    "xfrm_user",
];
/// Further modules for the newest kernel (mainline since 6.16).
const NEWEST_MODULES: [&str; 1] = ["ovpn"];

/// The kernel that a guest boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Choice {
    /// The newest that Debian offers, with the ovpn module where there is one.
    Newest,
    /// Debian 12's own, the oldest that Weft's kernel engine is tested on.
    Debian12,
}

/// A kernel in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// The output of `uname -r`.
    pub release: String,
    /// The suite that it came from.
    pub suite: String,
    /// The metapackage that it was found by.
    pub package: String,
    /// When the suites were last asked, in seconds since 1970.
    pub checked_s: u64,
}

impl Choice {
    /// All that there are.
    pub const ALL: [Self; 2] = [Self::Newest, Self::Debian12];

    /// The suites that have it, best first.
    const fn suites(self) -> &'static [&'static str] {
        match self {
            Self::Newest => &["trixie-backports", "trixie", "bookworm-backports"],
            Self::Debian12 => &["bookworm"],
        }
    }

    fn modules(self) -> Vec<&'static str> {
        let more: &[&str] = if self == Self::Newest { &NEWEST_MODULES } else { &[] };
        REQUIRED_MODULES.iter().chain(more).copied().collect()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Newest => "newest",
            Self::Debian12 => "6.1",
        })
    }
}

impl std::str::FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.to_string() == text);
        found.ok_or_else(|| format!("there is no kernel '{text}', only newest and 6.1"))
    }
}

impl Kernel {
    /// The kernel for a choice, from the cache or from Debian; `update` asks Debian in any case.
    ///
    /// # Errors
    /// There is none in the cache, and Debian's mirror cannot be reached or has none that will do.
    pub fn get(choice: Choice, update: bool) -> anyhow::Result<Self> {
        anyhow::ensure!(
            std::env::consts::ARCH == "x86_64",
            "the VM lab puts this machine's own programs into its guests, which are x86-64"
        );
        let place = Self::place()?;
        let _lock = locked(&place)?;
        let record = place.join(format!("{choice}.json"));
        let cached = Self::recorded(&record).filter(Self::is_complete);
        if let Some(kernel) = &cached
            && !update
            && !is_due(kernel.checked_s, now_s())
        {
            return Ok(kernel.clone());
        }
        let kernel = match (Self::resolve(choice, &place), cached) {
            (Ok(kernel), _) => kernel,
            (Err(error), Some(mut cached)) => {
                super::interrupt::check()?;
                note(&format!("{error:#}"));
                note(&format!("taking {} from the cache", cached.release));
                // Asked again tomorrow and not at every run: a mirror that is away costs time.
                cached.checked_s = now_s().saturating_sub(REFRESH_INTERVAL_S - 24 * 3600);
                cached
            }
            (Err(error), None) => return Err(error),
        };
        let text = serde_json::to_string_pretty(&kernel)?;
        std::fs::write(&record, text)
            .with_context(|| format!("cannot write {}", record.display()))?;
        Ok(kernel)
    }

    /// The compressed kernel that QEMU boots.
    ///
    /// # Errors
    /// There is no cache folder.
    pub fn image(&self) -> anyhow::Result<PathBuf> {
        Ok(self.directory()?.join("vmlinuz"))
    }

    /// The folder with `lib/modules/RELEASE`.
    ///
    /// # Errors
    /// There is no cache folder.
    pub fn directory(&self) -> anyhow::Result<PathBuf> {
        Ok(Self::place()?.join(&self.release))
    }

    fn place() -> anyhow::Result<PathBuf> {
        Ok(cache_directory()?.join("kernels"))
    }

    fn recorded(record: &Path) -> Option<Self> {
        serde_json::from_str(&std::fs::read_to_string(record).ok()?).ok()
    }

    fn is_complete(&self) -> bool {
        self.image().is_ok_and(|image| image.exists())
    }

    /// Asks suite by suite for a kernel with all modules; else takes the first that lacks only what
    /// one can do without.
    fn resolve(choice: Choice, place: &Path) -> anyhow::Result<Self> {
        let mirror = Mirror::of_this_machine()?;
        let mut second_best: Option<(Self, Vec<&str>)> = None;
        let mut reasons = Vec::new();
        for name in choice.suites() {
            match Self::from_suite(choice, &mirror, name, place) {
                Ok((kernel, missing)) if missing.is_empty() => return Ok(kernel),
                Ok((kernel, missing)) => {
                    note(&format!("{name}: {} has no {}", kernel.release, missing.join(", ")));
                    if missing.iter().all(|module| NEWEST_MODULES.contains(module)) {
                        second_best.get_or_insert((kernel, missing));
                    }
                }
                Err(error) => {
                    super::interrupt::check()?;
                    note(&format!("{name}: {error:#}"));
                    reasons.push(format!("{name}: {error}"));
                }
            }
        }
        match second_best {
            Some((kernel, missing)) => {
                step(&format!(
                    "taking {} although it has no {}",
                    kernel.release,
                    missing.join(", ")
                ));
                Ok(kernel)
            }
            None => bail!("no kernel {choice} to be had: {}", reasons.join("; ")),
        }
    }

    /// The kernel of a suite, in the smallest flavour that has all modules, and the modules that it lacks.
    fn from_suite(
        choice: Choice,
        mirror: &Mirror,
        name: &str,
        place: &Path,
    ) -> anyhow::Result<(Self, Vec<&'static str>)> {
        let suite = Suite::fetch(mirror, name, &place.join("apt"))?;
        let mut best: Option<(Self, Vec<&'static str>)> = None;
        for package in METAPACKAGES {
            let Some(kernel) = Self::fetch(&suite, package, place)? else { continue };
            let missing = kernel.missing(&choice.modules())?;
            if missing.is_empty() {
                step(&format!("kernel {choice}: {} from {name} ({package})", kernel.release));
                return Ok((kernel, missing));
            }
            if best.as_ref().is_none_or(|(_, fewest)| missing.len() < fewest.len()) {
                best = Some((kernel, missing));
            }
        }
        best.with_context(|| {
            format!("there is neither {} nor {}", METAPACKAGES[0], METAPACKAGES[1])
        })
    }

    fn fetch(suite: &Suite, package: &str, place: &Path) -> anyhow::Result<Option<Self>> {
        let Some(packages) = suite.kernel_packages(package)? else { return Ok(None) };
        let Some(release) = release_of(packages.iter().map(|package| package.name.as_str())) else {
            bail!("{package} names no linux-image-VERSION");
        };
        let kernel = Self {
            release,
            suite: suite.name().to_owned(),
            package: package.to_owned(),
            checked_s: now_s(),
        };
        if kernel.is_complete() {
            return Ok(Some(kernel));
        }
        step(&format!("fetching {} from {}", kernel.release, suite.name()));
        let fresh = tempfile::Builder::new().prefix(".fetch-").tempdir_in(place)?;
        suite.unpack(&packages, fresh.path())?;
        kernel.settle(fresh.path(), &place.join(&kernel.release))?;
        Ok(Some(kernel))
    }

    /// Brings what the packages hold into one form, whichever way they are split, and puts it in place
    /// whole.
    fn settle(&self, unpacked: &Path, place: &Path) -> anyhow::Result<()> {
        let release = &self.release;
        let find = |candidates: [String; 2]| {
            let found =
                candidates.iter().map(|path| unpacked.join(path)).find(|path| path.exists());
            found.with_context(|| format!("{release}: the packages hold no {}", candidates[0]))
        };
        let modules =
            find([format!("usr/lib/modules/{release}"), format!("lib/modules/{release}")])?;
        let image = find([
            format!("usr/lib/modules/{release}/vmlinuz"),
            format!("boot/vmlinuz-{release}"),
        ])?;
        let ready = unpacked.join("ready");
        make_directory(&ready.join("lib/modules"))?;
        std::fs::rename(image, ready.join("vmlinuz"))?;
        std::fs::rename(modules, ready.join("lib/modules").join(release))?;
        run(Command::new("depmod").arg("-b").arg(&ready).arg(release))?;
        let _ = std::fs::remove_dir_all(place);
        std::fs::rename(&ready, place).with_context(|| format!("cannot make {}", place.display()))
    }

    /// Those of these modules that the kernel has neither built in nor as a file.
    fn missing(&self, wanted: &[&'static str]) -> anyhow::Result<Vec<&'static str>> {
        let place = self.directory()?.join("lib/modules").join(&self.release);
        let mut lists = String::new();
        for name in ["modules.dep", "modules.builtin"] {
            lists.push_str(&std::fs::read_to_string(place.join(name)).unwrap_or_default());
        }
        let present: Vec<String> = lists.lines().map(module_name).collect();
        Ok(wanted
            .iter()
            .copied()
            .filter(|name| !present.iter().any(|found| found == name))
            .collect())
    }
}

/// The name of a module's file, as the kernel says it: `-` and `_` are one.
pub(crate) fn module_name(line: &str) -> String {
    let path = line.split(':').next().unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or_default();
    file.split(".ko").next().unwrap_or_default().replace('-', "_")
}

/// The future output of `uname -r`, from the names of a kernel's packages.
fn release_of<'a>(names: impl Iterator<Item = &'a str>) -> Option<String> {
    let mut releases = names.filter_map(|name| name.strip_prefix("linux-image-"));
    releases.find(|rest| rest.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned)
}

fn is_due(checked_s: u64, now_s: u64) -> bool {
    now_s.saturating_sub(checked_s) >= REFRESH_INTERVAL_S
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_release_is_that_of_the_image_with_a_version() {
        let names = [
            "linux-image-cloud-amd64",
            "linux-base-9.9-amd64",
            "linux-image-7.3.4+deb13-cloud-amd64",
        ];
        assert_eq!(release_of(names.into_iter()).unwrap(), "7.3.4+deb13-cloud-amd64");
        assert_eq!(release_of(["linux-image-cloud-amd64"].into_iter()), None);
    }

    #[test]
    fn modules_are_named_as_the_kernel_names_them() {
        assert_eq!(
            module_name("kernel/crypto/aesni-intel.ko.xz: kernel/lib/a.ko.xz"),
            "aesni_intel"
        );
        assert_eq!(module_name("kernel/net/netfilter/nft_xfrm.ko:"), "nft_xfrm");
        assert_eq!(module_name("kernel/drivers/char/virtio_console.ko"), "virtio_console");
    }

    #[test]
    fn the_suites_are_asked_once_a_week() {
        assert!(!is_due(1_000, 1_000));
        assert!(!is_due(1_000, 1_000 + REFRESH_INTERVAL_S - 1));
        assert!(is_due(1_000, 1_000 + REFRESH_INTERVAL_S));
        // A clock that was set back does not make a kernel stale.
        assert!(!is_due(u64::MAX, 0));
    }

    #[test]
    fn choices_are_read_as_they_are_shown() {
        for choice in Choice::ALL {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!("5.10".parse::<Choice>().unwrap_err().contains("newest and 6.1"));
    }
}
