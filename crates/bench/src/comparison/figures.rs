//! Runs that are kept: `docs/figures/TABLE-NAME.json`, a file for each table and machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::report::Report;

/// The version of the format; a file of another one is refused.
const VERSION: u32 = 1;

/// A run as it is kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    version: u32,
    /// The table, as `--table` names it, or a name for figures that another command makes.
    pub(crate) table: String,
    /// The command with its options.
    pub(crate) command: String,
    /// A remark for readers, as that an older Weft was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
    /// The machine and the figures.
    pub(crate) report: Report,
    /// Figures that another command than `./dev bench` makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) listing: Option<Listing>,
}

/// A table whose cells are texts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Listing {
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Kept {
    /// A run of `./dev bench` with these arguments.
    pub(crate) fn of(table: &str, arguments: impl Iterator<Item = String>, report: Report) -> Self {
        let command = format!("./dev {}", arguments.collect::<Vec<_>>().join(" "));
        Self { version: VERSION, table: table.to_owned(), command, report, ..Self::default() }
    }

    /// Writes the run under the documents' directory and returns the file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(crate) fn write(&self, docs: &Path, name: &str) -> anyhow::Result<PathBuf> {
        let file = docs.join("figures").join(format!("{}-{name}.json", self.table));
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(&file, text + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }

    fn read(file: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(file)?;
        let kept: Self = serde_json::from_str(&text)?;
        let version = kept.version;
        anyhow::ensure!(version == VERSION, "version {version}, expected {VERSION}");
        Ok(kept)
    }
}

/// Fails before a long run that could not be kept.
///
/// # Errors
/// Returns an error if the runs' directory is missing.
pub(crate) fn require(docs: &Path) -> anyhow::Result<()> {
    let directory = docs.join("figures");
    anyhow::ensure!(
        directory.is_dir(),
        "cannot keep a run: {} is missing; run this by ./dev",
        directory.display()
    );
    Ok(())
}

/// All kept runs, by their files' names without `.json`.
///
/// # Errors
/// Returns an error if the directory or a file cannot be read, or a file has another format.
pub(crate) fn read_all(docs: &Path) -> anyhow::Result<BTreeMap<String, Kept>> {
    let directory = docs.join("figures");
    let cannot = || format!("cannot read {}; run this by ./dev", directory.display());
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(&directory).with_context(cannot)? {
        let file = entry.with_context(cannot)?.path();
        if file.extension().is_some_and(|extension| extension == "json") {
            let kept = Kept::read(&file);
            let kept = kept.with_context(|| format!("cannot use {}", file.display()))?;
            let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            all.insert(name, kept);
        }
    }
    Ok(all)
}

/// Checks the NAME of `--keep`, which becomes a part of a file's name.
pub(crate) fn parse_name(name: &str) -> Result<String, String> {
    let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if !name.is_empty() && name.chars().all(is_of_name) {
        return Ok(name.to_owned());
    }
    Err("use lower-case letters, digits and hyphens, such as epyc-2".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn a_kept_run_is_read_as_it_was_written() {
        let docs = tempfile::tempdir().unwrap();
        std::fs::create_dir(docs.path().join("figures")).unwrap();
        let arguments = ["bench", "--rounds", "3"].map(str::to_owned);
        let kept = Kept::of("systems", arguments.into_iter(), report());
        let file = kept.write(docs.path(), "epyc-2").unwrap();
        assert!(file.ends_with("figures/systems-epyc-2.json"), "{}", file.display());
        assert_eq!(kept.command, "./dev bench --rounds 3");
        assert!(require(docs.path()).is_ok() && require(&file).is_err());
        let all = read_all(docs.path()).unwrap();
        assert_eq!(all, BTreeMap::from([("systems-epyc-2".to_owned(), kept)]));
    }

    #[test]
    fn another_version_of_the_format_is_refused() {
        let docs = tempfile::tempdir().unwrap();
        std::fs::create_dir(docs.path().join("figures")).unwrap();
        let kept = Kept { version: VERSION + 1, ..Kept::default() };
        kept.write(docs.path(), "x").unwrap();
        let error = format!("{:#}", read_all(docs.path()).unwrap_err());
        assert!(error.contains("version 2, expected 1"), "{error}");
    }

    #[test]
    fn a_name_is_part_of_a_files_name() {
        assert_eq!(parse_name("xeon-16"), Ok("xeon-16".to_owned()));
        for name in ["", "../x", "Xeon", "a b"] {
            assert!(parse_name(name).is_err(), "{name}");
        }
    }
}
