//! The commands and options that documents for users and developers show are Weft's.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};

use weft_lab::documents::{commands, fault};

/// The directories of documents.
const DIRECTORIES: [&str; 2] = ["docs", "docs/design"];
/// Shown as a command is, but a text of which a hash is made.
const NO_COMMANDS: [&str; 1] = ["network range"];

#[test]
fn each_command_that_a_document_shows_is_there() {
    let mut files: Vec<PathBuf> = DIRECTORIES.iter().flat_map(|it| documents(it)).collect();
    files.push(root().join("README.md"));
    let (mut seen, mut found) = (0, Vec::new());
    for file in files {
        for shown in commands(&std::fs::read_to_string(&file).unwrap()) {
            seen += 1;
            if let Some(fault) = fault(&shown.text)
                && !NO_COMMANDS.contains(&shown.text.as_str())
            {
                found.push(format!("{}:{}: {fault}", file.display(), shown.line));
            }
        }
    }
    assert!(seen > 100, "{seen} commands alone were found");
    assert!(found.is_empty(), "documents show what Weft does not have: {found:#?}");
}

fn documents(directory: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(directory)).unwrap();
    let files = entries.map(|entry| entry.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|it| it == "md")).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
