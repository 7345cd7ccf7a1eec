//! `weft openvpn import`: reads a server's configuration with all files that it names, since the daemon may read few,
//! and shows the daemon's report.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use weft_api::call;
use weft_api::{
    ApiError, Client, CrlRequest, ErrorKind, ImportReport, ImportRequest, ImportedLine,
};
use weft_openvpn::config::{CONFIG_BYTES_MAX, read_client_file, read_server_config};

use crate::cli::output;

/// Files of clients at most.
const CLIENT_FILES_MAX: usize = 65_536;

/// `weft openvpn import`.
#[derive(Debug, Args)]
pub struct OpenvpnImportArgs {
    /// The server's configuration, such as /etc/openvpn/server/server.conf
    #[arg(value_name = "FILE", required_unless_present = "crl")]
    pub file: Option<PathBuf>,
    /// Say what would become of each line, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Leave out the lines that are refused, but for those that decide who is let in
    #[arg(long)]
    pub without_refused: bool,
    /// Private key of the certificate authority, so that weft openvpn client makes profiles by it
    #[arg(long, value_name = "FILE")]
    pub ca_key: Option<PathBuf>,
    /// Program that judges user names and passwords in the place of plugin and auth-user-pass-verify
    #[arg(long, value_name = "PROGRAM")]
    pub auth_program: Option<PathBuf>,
    /// Network that clients join (default: the one of the range of server, which is made if there is none)
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Take over in the place of the authority of weft ca init, whose certificates count no more, or of another host's
    /// configuration
    #[arg(long)]
    pub replace: bool,
    /// Replace the list of revoked certificates of the configuration that was taken over
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "dry_run", "without_refused", "ca_key", "auth_program", "network", "replace"])]
    pub crl: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub(crate) async fn run(args: OpenvpnImportArgs, daemon: &Client) -> anyhow::Result<()> {
    if let Some(path) = &args.crl {
        let request = CrlRequest { crl: needed(path)? };
        let report: ImportReport = daemon.call::<call::ImportCrl>(&request).await?;
        return output::print(args.json, &report, crl_text);
    }
    let Some(path) = &args.file else { bail!("name the server's configuration") };
    let mut request = gathered(path)?;
    request.ca_key = args.ca_key.as_deref().map(needed).transpose()?;
    request.auth_program = args.auth_program;
    request.network = args.network;
    request.dry_run = args.dry_run;
    request.without_refused = args.without_refused;
    request.replace = args.replace;
    let report: ImportReport = daemon.call::<call::Import>(&request).await?;
    output::print(args.json, &report, |report| text(path, report))?;
    let refused = report.lines.iter().filter(|line| line.verdict == "refused").count();
    if report.is_possible {
        return Ok(());
    }
    let (faults, lines) = (report.faults.len(), refused);
    let text = format!(
        "nothing was taken over: {faults} faults and {lines} lines that are refused stand in the way; correct or remove them, or leave lines out by --without-refused, but for those that decide who is let in"
    );
    Err(ApiError::new(ErrorKind::Conflict, text).into())
}

/// The configuration with all files that it names. Those that cannot be read are noted with the reason.
fn gathered(path: &Path) -> anyhow::Result<ImportRequest> {
    let mut found = Found {
        folder: path.parent().map(Path::to_path_buf).unwrap_or_default(),
        ..Found::default()
    };
    let config = needed(path)?;
    let import = read_server_config(&config, &mut |path: &str| found.read(path));
    let mut client_files = BTreeMap::new();
    if let Some(folder) = &import.settings.client_folder {
        client_files = found.client_files(folder)?;
    }
    for text in client_files.values() {
        let _ = read_client_file(text, &mut |path: &str| found.read(path));
    }
    // A server that has not run yet has none.
    let pool = import.settings.pool_file.and_then(|file| found.text(&file.path).ok());
    let Found { files, unread, .. } = found;
    Ok(ImportRequest { config, files, unread, client_files, pool, ..ImportRequest::default() })
}

/// Files of a configuration.
#[derive(Default)]
struct Found {
    /// The folder that relative paths are seen from.
    folder: PathBuf,
    files: BTreeMap<String, String>,
    unread: BTreeMap<String, String>,
}

impl Found {
    fn text(&self, path: &str) -> Result<String, String> {
        limited(&self.folder.join(path)).map_err(|error| error.to_string())
    }

    /// Reads a file, and keeps it.
    fn read(&mut self, path: &str) -> Result<String, String> {
        let read = self.text(path);
        match &read {
            Ok(text) => _ = self.files.insert(path.to_owned(), text.clone()),
            Err(why) => _ = self.unread.insert(path.to_owned(), why.clone()),
        }
        read
    }

    fn client_files(&mut self, folder: &str) -> anyhow::Result<BTreeMap<String, String>> {
        let mut files = BTreeMap::new();
        let entries = match std::fs::read_dir(self.folder.join(folder)) {
            Ok(entries) => entries,
            Err(error) => {
                self.unread.insert(folder.to_owned(), error.to_string());
                return Ok(files);
            }
        };
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {folder}"))?;
            if entry.path().is_dir() {
                continue;
            }
            if files.len() == CLIENT_FILES_MAX {
                bail!(
                    "more than {CLIENT_FILES_MAX} files in {folder}: remove those of former clients"
                );
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            match limited(&entry.path()) {
                Ok(text) => _ = files.insert(name, text),
                Err(error) => {
                    self.unread.insert(format!("{folder}/{name}"), error.to_string());
                }
            }
        }
        Ok(files)
    }
}

fn needed(path: &Path) -> anyhow::Result<String> {
    limited(path).with_context(|| format!("cannot read {}", path.display()))
}

fn limited(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(CONFIG_BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

/// The report: all lines of the configuration, and of the clients' files those that are not taken as they are.
fn text(path: &Path, report: &ImportReport) -> String {
    let mut text = String::new();
    let is_shown = |line: &&ImportedLine| line.file.is_none() || line.verdict != "taken";
    for line in report.lines.iter().filter(is_shown) {
        let file = line.file.clone().unwrap_or_else(|| path.display().to_string());
        let verdict = match line.verdict.as_str() {
            "taken" => "taken over",
            "nothing" => "means nothing here",
            other => other,
        };
        let _ = write!(text, "{file}:{}: {}: {verdict}", line.line, line.text);
        let _ = writeln!(
            text,
            "{}",
            line.reason.iter().map(|why| format!(": {why}")).collect::<String>()
        );
    }
    for fault in &report.faults {
        let _ = writeln!(text, "{}: {fault}", path.display());
    }
    if let Some(range) = report.range {
        let _ = writeln!(text, "clients are on network {}, range {range}", report.network);
    }
    if report.client_files > 0 {
        let _ = writeln!(text, "{} files of clients", report.client_files);
    }
    if report.imported {
        let _ = writeln!(
            text,
            "{} addresses are kept for clients; {} certificates are revoked{}",
            report.kept_addresses,
            report.revoked,
            report
                .crl_until
                .iter()
                .map(|until| format!(", by a list until {until}"))
                .collect::<String>()
        );
        text.push_str("taken over: weft openvpn serve serves by it\n");
    }
    text.trim_end().to_owned()
}

fn crl_text(report: &ImportReport) -> String {
    let until = report.crl_until.iter().map(|until| format!(", until {until}"));
    format!("{} certificates are revoked{}", report.revoked, until.collect::<String>())
}
