//! Packages of other Debian suites, without touching the machine's own apt. It uses a private list, the mirror and
//! keyring of the machine's own sources, and apt's verification.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::{make_directory, run};

/// How long apt waits for a mirror that says nothing.
const MIRROR_TIMEOUT_S: u32 = 20;
/// How many packages a kernel is made of at the most.
const PACKAGES_MAX: usize = 32;
/// The keys of all Debian suites, from the package `debian-archive-keyring`.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The mirror that the machine gets its Debian from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mirror {
    uri: String,
    keyring: String,
}

/// A package of a suite, as its index describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    depends: Vec<String>,
}

/// A suite with its lists in a separate folder.
pub(crate) struct Suite {
    name: String,
    directory: PathBuf,
}

impl Mirror {
    /// Reads the machine's apt sources.
    pub(crate) fn of_this_machine() -> anyhow::Result<Self> {
        let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
        let codename = release
            .lines()
            .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
            .map(|name| name.trim_matches('"').to_owned())
            .context(
                "/etc/os-release names no VERSION_CODENAME: the VM lab needs Debian 12 or 13",
            )?;
        let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
        let parts = std::fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
        files.extend(parts.map(|entry| entry.path()));
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let found = match file.extension().and_then(|extension| extension.to_str()) {
                Some("sources") => Self::in_stanzas(&text, &codename),
                Some("list") => Self::in_lines(&text, &codename),
                _ => None,
            };
            if let Some(mirror) = found {
                return Ok(mirror);
            }
        }
        bail!(
            "no apt source of the suite {codename} in /etc/apt: the VM lab takes its kernels from Debian's mirror"
        )
    }

    /// The deb822 format (sources.list(5)).
    fn in_stanzas(text: &str, codename: &str) -> Option<Self> {
        stanzas(text).into_iter().find_map(|fields| {
            let words = |name| field(&fields, name).unwrap_or_default().split_whitespace();
            let wanted = words("Types").any(|word| word == "deb")
                && words("Suites").any(|word| word == codename)
                && words("Components").any(|word| word == "main")
                && field(&fields, "Enabled") != Some("no");
            let signed = words("Signed-By").next().filter(|path| path.starts_with('/'));
            let uri = words("URIs").next().filter(|_| wanted)?;
            Some(Self::new(uri, signed))
        })
    }

    /// The format of one line for each source (sources.list(5)).
    fn in_lines(text: &str, codename: &str) -> Option<Self> {
        text.lines().find_map(|line| {
            let rest = line.trim().strip_prefix("deb ")?.trim();
            let (options, rest) = match rest.strip_prefix('[') {
                Some(rest) => rest.split_once(']')?,
                None => ("", rest),
            };
            let mut words = rest.split_whitespace();
            let uri = words.next()?;
            let wanted = words.next()? == codename && words.any(|word| word == "main");
            let signed =
                options.split_whitespace().find_map(|word| word.strip_prefix("signed-by="));
            wanted.then(|| Self::new(uri, signed))
        })
    }

    fn new(uri: &str, signed: Option<&str>) -> Self {
        Self { uri: uri.to_owned(), keyring: signed.unwrap_or(KEYRING).to_owned() }
    }
}

impl Suite {
    /// Fetches a suite's index, verified against the keyring.
    pub(crate) fn fetch(mirror: &Mirror, name: &str, directory: &Path) -> anyhow::Result<Self> {
        let suite = Self { name: name.to_owned(), directory: directory.join(name) };
        make_directory(&suite.directory.join("lists/partial"))?;
        make_directory(&suite.directory.join("cache/archives/partial"))?;
        if !Path::new(&mirror.keyring).exists() {
            bail!("{} is missing: apt-get install debian-archive-keyring", mirror.keyring);
        }
        let source = format!("deb [signed-by={}] {} {name} main\n", mirror.keyring, mirror.uri);
        std::fs::write(suite.directory.join("sources.list"), source)?;
        // Without the machine's own packages: they must not decide what this suite's candidate is.
        std::fs::write(suite.directory.join("status"), "")?;
        run(suite.apt("apt-get").args(["-o", "APT::Update::Error-Mode=any", "update"]))
            .with_context(|| format!("cannot fetch the index of {name} from {}", mirror.uri))?;
        Ok(suite)
    }

    /// The name, as in `trixie-backports`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A package of this suite, if there is one.
    pub(crate) fn package(&self, name: &str) -> anyhow::Result<Option<Package>> {
        let output = self.apt("apt-cache").args(["show", "--no-all-versions", name]).output();
        let output = output.context("cannot start apt-cache")?;
        Ok(packages(&String::from_utf8_lossy(&output.stdout)).into_iter().next())
    }

    /// A metapackage and the packages of the kernel that it stands for.
    pub(crate) fn kernel_packages(&self, meta: &str) -> anyhow::Result<Option<Vec<Package>>> {
        let Some(first) = self.package(meta)? else { return Ok(None) };
        let mut found = vec![first];
        let mut next = 0;
        while next < found.len() {
            for name in found[next].kernel_depends() {
                if found.iter().any(|package| package.name == name) {
                    continue;
                }
                let package = self.package(&name)?;
                let package = package.with_context(|| format!("{} has no {name}", self.name))?;
                found.push(package);
                anyhow::ensure!(found.len() <= PACKAGES_MAX, "{meta} depends on too many packages");
            }
            next += 1;
        }
        Ok(Some(found))
    }

    /// Downloads packages and unpacks them into a folder.
    pub(crate) fn unpack(&self, packages: &[Package], into: &Path) -> anyhow::Result<()> {
        let place = into.join("packages");
        make_directory(&place)?;
        let mut download = self.apt("apt-get");
        download.current_dir(&place).arg("download");
        download
            .args(packages.iter().map(|package| format!("{}={}", package.name, package.version)));
        run(&mut download)?;
        for entry in std::fs::read_dir(&place)?.flatten() {
            run(Command::new("dpkg-deb").arg("-x").arg(entry.path()).arg(into))?;
        }
        std::fs::remove_dir_all(&place).context("cannot remove the packages")
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
        let place =
            |key: &str, name: &str| format!("{key}={}", self.directory.join(name).display());
        let options = [
            place("Dir::Etc::sourcelist", "sources.list"),
            "Dir::Etc::sourceparts=-".to_owned(),
            "Dir::Etc::preferencesparts=-".to_owned(),
            "Dir::Etc::preferences=-".to_owned(),
            place("Dir::State::lists", "lists"),
            place("Dir::State::status", "status"),
            place("Dir::Cache", "cache"),
            "APT::Architecture=amd64".to_owned(),
            "APT::Architectures=amd64".to_owned(),
            // The folder is the user's own: apt's user could not write there.
            "APT::Sandbox::User=".to_owned(),
            "APT::Get::AllowUnauthenticated=false".to_owned(),
            "Acquire::AllowInsecureRepositories=false".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::Retries=2".to_owned(),
            format!("Acquire::http::Timeout={MIRROR_TIMEOUT_S}"),
            format!("Acquire::https::Timeout={MIRROR_TIMEOUT_S}"),
        ];
        for option in options {
            command.args(["-o", &option]);
        }
        command
    }
}

impl Package {
    /// Dependencies of this package that are parts of a kernel; tools such as `kmod` are not.
    fn kernel_depends(&self) -> Vec<String> {
        const PARTS: [&str; 4] = ["linux-image-", "linux-binary-", "linux-modules-", "linux-base-"];
        let part = |name: &&String| PARTS.iter().any(|prefix| name.starts_with(prefix));
        self.depends.iter().filter(part).cloned().collect()
    }
}

/// The packages that `apt-cache show` prints, best first.
fn packages(text: &str) -> Vec<Package> {
    let package = |fields: Fields| {
        let depends = field(&fields, "Depends").unwrap_or_default();
        // The first of alternatives (`a | b`), without version and architecture.
        let name = |word: &str| {
            let first = word.split('|').next().unwrap_or_default();
            first.trim().split([' ', '(', ':']).next().unwrap_or_default().to_owned()
        };
        Some(Package {
            name: field(&fields, "Package")?.to_owned(),
            version: field(&fields, "Version")?.to_owned(),
            depends: depends.split(',').map(name).filter(|name| !name.is_empty()).collect(),
        })
    };
    stanzas(text).into_iter().filter_map(package).collect()
}

type Fields = Vec<(String, String)>;

/// The paragraphs of a control file (deb822(5)); continued lines are joined by a space.
fn stanzas(text: &str) -> Vec<Fields> {
    let mut all = vec![Fields::new()];
    for line in text.lines() {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            all.push(Fields::new());
            continue;
        }
        let Some(fields) = all.last_mut() else { continue };
        if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.to_owned(), value.trim().to_owned()));
        }
    }
    all.retain(|fields| !fields.is_empty());
    all
}

fn field<'a>(fields: &'a Fields, name: &str) -> Option<&'a str> {
    let found = fields.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
    found.map(|(_, value)| value.as_str())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SHOWN: &str = "Package: linux-image-7.3.4+deb13-cloud-amd64
Version: 7.3.4-1~bpo13+1
Depends: dracut | initramfs-tools (>= 0.120+deb8u2), linux-base-7.3.4+deb13-cloud-amd64 (= 7.3.4-1~bpo13+1),
 linux-binary-7.3.4+deb13-cloud-amd64:amd64 (= 7.3.4-1~bpo13+1)
Description: Linux
 .
 linux-modules-none: no field

Package: linux-image-6.1.0-50-cloud-amd64
Version: 6.1.176-1
";

    #[test]
    fn a_split_kernel_names_its_parts_and_not_its_tools() {
        let found = packages(SHOWN);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].version, "7.3.4-1~bpo13+1");
        assert_eq!(found[0].depends[0], "dracut");
        let parts = ["linux-base-7.3.4+deb13-cloud-amd64", "linux-binary-7.3.4+deb13-cloud-amd64"];
        assert_eq!(found[0].kernel_depends(), parts);
        assert_eq!(found[1].name, "linux-image-6.1.0-50-cloud-amd64");
        assert!(found[1].depends.is_empty());
    }

    #[test]
    fn nothing_shown_is_no_package() {
        assert!(packages("").is_empty());
        assert!(packages("\n\nPackage: half\n\n").is_empty());
    }

    #[test]
    fn the_mirror_is_that_of_the_own_suite_in_either_format() {
        let stanzas = "# note\nTypes: deb\nURIs: http://else.example/\nSuites: nodistro\nComponents: main\n\n\
            Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\
            Components: main\nSigned-By: /keys/a.gpg\n\nTypes: deb\nURIs: http://last.example/\n\
            Suites: bookworm-security\nComponents: main\n";
        let wanted = Mirror {
            uri: "http://mirror.example/debian".to_owned(),
            keyring: "/keys/a.gpg".to_owned(),
        };
        assert_eq!(Mirror::in_stanzas(stanzas, "bookworm"), Some(wanted.clone()));
        assert_eq!(Mirror::in_stanzas(stanzas, "trixie"), None);
        let lines = "# deb http://no.example/ bookworm main\n\
            deb https://packages.example/apt cloud-sdk-bookworm main\n\
            deb [arch=amd64 signed-by=/keys/a.gpg] http://mirror.example/debian bookworm main\n";
        assert_eq!(Mirror::in_lines(lines, "bookworm"), Some(wanted));
        let plain =
            Mirror::in_lines("deb http://mirror.example/debian trixie contrib main", "trixie");
        assert_eq!(plain.unwrap().keyring, KEYRING);
    }
}
