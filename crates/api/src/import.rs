//! Taking over the configuration of an OpenVPN server.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// A server's configuration, with the files that it names. It holds private keys: never log it.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImportRequest {
    /// The text of the configuration.
    pub config: String,
    /// The files that it names, by their paths as they are written, seen from its own folder.
    pub files: BTreeMap<String, String>,
    /// Why others could not be read, by their paths.
    pub unread: BTreeMap<String, String>,
    /// The files of single clients, by the names of the files.
    pub client_files: BTreeMap<String, String>,
    /// The file of `ifconfig-pool-persist`, if there is one.
    pub pool: Option<String>,
    /// The authority's private key, in PEM, by which profiles for new clients are made.
    pub ca_key: Option<String>,
    /// The program that judges user names and passwords in the place of those that the configuration names.
    #[serde(default)]
    pub auth_program: Option<PathBuf>,
    /// The network that clients join; `None`: that of the configuration's range.
    pub network: Option<String>,
    /// Only the report is made.
    pub dry_run: bool,
    /// Lines that are refused are left out, but for those that decide who is let in.
    pub without_refused: bool,
    /// Certificates of this host's own authority count no more.
    pub replace: bool,
}

/// A new list of revoked certificates for a configuration that was taken over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrlRequest {
    /// The list, or several, in PEM.
    pub crl: String,
}

/// What became of a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedLine {
    /// The file, where it is another than the configuration: one that it names by `config`, or that of a client.
    pub file: Option<String>,
    /// The line's number, from 1.
    pub line: usize,
    /// The line, without keys.
    pub text: String,
    /// `taken`, `nothing` (it means nothing here) or `refused`.
    pub verdict: String,
    /// Why, and what to do.
    pub reason: Option<String>,
}

/// The report on a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportReport {
    /// What became of each line.
    pub lines: Vec<ImportedLine>,
    /// Faults that no single line has. Nothing is taken over while there are any.
    pub faults: Vec<String>,
    /// Whether nothing stands in the way.
    pub is_possible: bool,
    /// Whether the configuration was taken over.
    pub imported: bool,
    /// The network that clients join.
    pub network: String,
    /// The range of clients' addresses there.
    pub range: Option<IpNet>,
    /// Clients with a file of their own.
    pub client_files: usize,
    /// Clients whose address is kept for them.
    pub kept_addresses: usize,
    /// Revoked certificates.
    pub revoked: usize,
    /// When the list of revoked certificates ends, RFC 3339.
    pub crl_until: Option<String>,
    /// Whether profiles for new clients can be made.
    pub makes_profiles: bool,
}
