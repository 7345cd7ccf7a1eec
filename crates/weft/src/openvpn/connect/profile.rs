//! Reads the profile and the files that it names, and says what becomes of its lines.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use weft_openvpn::config::{
    CONFIG_BYTES_MAX, ClientImport, ClientProfile, ImportLine, Verdict, read_client_profile,
};

use super::report::Report;

/// The profile in a file. Files that it names are sought in its folder.
///
/// # Errors
/// It cannot be read, a line of it is refused, or something is missing. Every such line has been told before.
pub(super) fn read(path: &Path, report: Report) -> anyhow::Result<ClientProfile> {
    let text = limited(path).with_context(|| format!("cannot read {}", path.display()))?;
    let folder = path.parent().map(PathBuf::from).unwrap_or_default();
    let mut files = |name: &str| limited(&folder.join(name)).map_err(|error| error.to_string());
    let ClientImport { profile, lines, missing } = read_client_profile(&text, &mut files);
    let mut refused = 0;
    for line in &lines {
        match &line.verdict {
            Verdict::Taken => {}
            Verdict::NoMeaning(why) => {
                report.warn(&format!("{} ({}) is left out: {why}", place(path, line), line.text));
            }
            Verdict::Refused(why) => {
                refused += 1;
                report.warn(&format!("{} ({}): {why}", place(path, line), line.text));
            }
        }
    }
    if let Some(first) = missing.first() {
        missing.iter().for_each(|what| report.warn(&format!("{}: {what}", path.display())));
        bail!("{} is no profile of a client: {first}", path.display());
    }
    if refused > 0 {
        let lines = if refused == 1 { "line" } else { "lines" };
        bail!("{refused} {lines} of {} refused: correct or remove them", path.display());
    }
    Ok(profile)
}

fn place(path: &Path, line: &ImportLine) -> String {
    let file = line.file.clone().unwrap_or_else(|| path.display().to_string());
    format!("{file}:{}", line.line)
}

fn limited(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(CONFIG_BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}
