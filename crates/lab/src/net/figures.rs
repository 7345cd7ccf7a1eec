//! The measurements of `./dev demo` and `./dev bench`.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// Runs the benchmark's program and returns the JSON that it wrote.
///
/// # Errors
/// Returns an error if the program fails, with its output, or writes no JSON.
pub fn measured(words: &[&str]) -> anyhow::Result<Value> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("figures.json");
    let weft = PathBuf::from(std::env::var("WEFT_BIN")?);
    let output = Command::new(weft.with_file_name("weft-bench"))
        .args(words)
        .arg("--json")
        .arg(&file)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "weft-bench {}: {said}", words.join(" "));
    Ok(serde_json::from_slice(&std::fs::read(&file)?)?)
}

/// The rows' names.
#[must_use]
pub fn names(figures: &Value) -> Vec<&str> {
    let rows = figures["rows"].as_array().into_iter().flatten();
    rows.filter_map(|row| row["name"].as_str()).collect()
}
