//! `weft setup-cni`: installs the CNI plugin for container runtimes, or takes it away.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::json;
use weft_api::{ApiError, ErrorKind};
use weft_container::cni::setup::{Options, Report, SetupError, install, remove};
use weft_container::cni::{ApiDaemon, Version};
use weft_daemon::config::DEFAULT_RUNTIME_DIR;

use super::args::SetupCniArgs;
use super::output;

pub(super) fn setup_cni(args: SetupCniArgs, runtime_dir: &Path) -> anyhow::Result<ExitCode> {
    let SetupCniArgs { remove: is_removal, bin_dir, config_dir, masquerade, json } = args;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut options = Options::of_program(program);
    options.bin_dir = bin_dir.unwrap_or(options.bin_dir);
    options.config_dir = config_dir.unwrap_or(options.config_dir);
    options.masquerade = masquerade;
    if runtime_dir != Path::new(DEFAULT_RUNTIME_DIR) {
        options.runtime_dir = Some(std::path::absolute(runtime_dir)?);
    }
    let report = if is_removal {
        remove(&options).map_err(refusal)?
    } else {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(install(&options, &ApiDaemon::of(runtime_dir))).map_err(refusal)?
    };
    report.notes.iter().for_each(|note| output::progress(&format!("note: {note}")));
    output::print(json, &as_json(&report), |_| text(&report, &options, is_removal))?;
    Ok(ExitCode::SUCCESS)
}

fn refusal(error: SetupError) -> ApiError {
    let kind = match &error {
        SetupError::NotReady(_) => ErrorKind::Unavailable,
        SetupError::Name { .. } => ErrorKind::BadRequest,
        SetupError::Io { .. } => ErrorKind::Internal,
    };
    ApiError::new(kind, error)
}

fn as_json(report: &Report) -> serde_json::Value {
    let versions: Vec<&str> = report.versions.iter().map(|version| version.as_str()).collect();
    json!({
        "changed": report.changed,
        "cni_versions": versions,
        "chained": report.chained,
        "notes": report.notes,
    })
}

fn text(report: &Report, options: &Options, is_removal: bool) -> String {
    let files = |word: &str| {
        let lines = report.changed.iter().map(|file| format!("{word} {}\n", file.display()));
        lines.collect::<String>()
    };
    if is_removal {
        return match report.changed.is_empty() {
            true => "the CNI plugin is not installed".to_owned(),
            false => files("removed"),
        };
    }
    let versions: Vec<&str> = report.versions.iter().copied().map(Version::as_str).collect();
    let mut plugins = vec!["weft-cni".to_owned()];
    plugins.extend(report.chained.iter().cloned());
    format!(
        "{}{} offers CNI {} with {}",
        files("wrote"),
        options.conflist().display(),
        versions.join(", "),
        plugins.join(", ")
    )
}
