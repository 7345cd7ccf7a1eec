//! The machine that the figures were made on, and the exact commands that made them.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sandbox::{Output, output_of};

/// Limit of a version command.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// The data that a reader needs to judge the figures, or to repeat them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release.
    pub kernel: String,
    /// Processor model.
    pub cpu: String,
    /// Logical processors.
    pub cores: usize,
    /// When the run began, RFC 3339.
    pub date: String,
    /// The commit that was built, with `-dirty` where the tree differed; `None` where git cannot say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Versions of the programs that took part, and settings that matter.
    pub versions: BTreeMap<String, String>,
    /// The exact commands, by measurement.
    pub commands: BTreeMap<String, String>,
    /// Rows, or rounds of them, that the figures lack, with the reason, by row and underlay or link.
    #[serde(default)]
    pub left_out: BTreeMap<String, String>,
}

impl Machine {
    /// Describes this machine; a value that cannot be read is `unknown`.
    #[must_use]
    pub fn here() -> Self {
        Self {
            kernel: read_trimmed("/proc/sys/kernel/osrelease"),
            cpu: weft::doctor::cpu_model(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            date: weft_daemon::timestamp::format(std::time::SystemTime::now()),
            commit: commit(),
            versions: versions(),
            commands: BTreeMap::new(),
            left_out: BTreeMap::new(),
        }
    }

    /// Adds what an earlier part of the run noted; of two notes of one name the earlier stays.
    #[must_use]
    pub fn with_earlier(mut self, earlier: Self) -> Self {
        self.versions.extend(earlier.versions);
        self.commands.extend(earlier.commands);
        self.left_out.extend(earlier.left_out);
        self
    }
}

fn versions() -> BTreeMap<String, String> {
    let mut versions = BTreeMap::from([
        ("weft".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("profile".to_owned(), profile().to_owned()),
        ("os".to_owned(), os_name(&std::fs::read_to_string("/etc/os-release").unwrap_or_default())),
    ]);
    let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
    versions.insert("cpu_governor".to_owned(), read_trimmed(governor));
    for (name, words) in [
        ("iperf3", ["iperf3", "--version"]),
        ("iproute2", ["ip", "-V"]),
        ("ethtool", ["ethtool", "--version"]),
    ] {
        versions.insert(name.to_owned(), first_line_of(&words));
    }
    versions
}

/// The version of a Go program, as Go wrote it into the binary.
pub(crate) fn go_module_version(binary: &std::path::Path) -> Option<String> {
    let output =
        output_of(Command::new("go").args(["version", "-m"]).arg(binary), VERSION_LIMIT).ok()?;
    let line = output.stdout.lines().find(|line| line.trim_start().starts_with("mod"))?.to_owned();
    line.split_whitespace().nth(2).map(str::to_owned)
}

fn commit() -> Option<String> {
    let mut git = Command::new("git");
    git.args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty", "--abbrev=12"]);
    let output = output_of(&mut git, VERSION_LIMIT).and_then(Output::success).ok()?;
    Some(output.stdout.trim().to_owned())
}

fn profile() -> &'static str {
    if cfg!(debug_assertions) { "debug build: the figures are meaningless" } else { "optimised" }
}

fn first_line_of(words: &[&str; 2]) -> String {
    let [program, argument] = words;
    let output = output_of(Command::new(program).arg(argument), VERSION_LIMIT);
    let line = output.ok().and_then(|output| output.stdout.lines().next().map(str::to_owned));
    line.unwrap_or_else(unknown)
}

fn read_trimmed(path: &str) -> String {
    std::fs::read_to_string(path).map_or_else(|_| unknown(), |text| text.trim().to_owned())
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn os_name(os_release: &str) -> String {
    let line = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    line.map_or_else(unknown, |name| name.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_kernel_and_cores() {
        let machine = Machine::here();
        assert!(machine.kernel.contains('.'), "{machine:?}");
        assert!(machine.cores > 0);
    }

    #[test]
    fn the_notes_of_all_parts_of_a_run_survive() {
        let part = |mtu: &str| {
            let note = |what: &str| BTreeMap::from([(format!("{what} {mtu}"), mtu.to_owned())]);
            Machine {
                versions: note("version"),
                commands: note("command"),
                left_out: note("row on a link of"),
                ..Machine::default()
            }
        };
        let all = part("9000").with_earlier(part("1500"));
        for (notes, what) in [
            (&all.versions, "version"),
            (&all.commands, "command"),
            (&all.left_out, "row on a link of"),
        ] {
            let both = ["1500", "9000"].map(|mtu| (format!("{what} {mtu}"), mtu.to_owned()));
            assert_eq!(*notes, BTreeMap::from(both));
        }
    }
}
