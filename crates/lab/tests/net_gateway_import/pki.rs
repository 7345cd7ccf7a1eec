//! A certificate authority as easy-rsa makes it: by the `openssl` program, in a folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

const CONFIG: &str = "[ca]
default_ca = here
[here]
database = index.txt
serial = serial
new_certs_dir = .
certificate = ca.crt
private_key = ca.key
default_md = sha256
default_days = 825
default_crl_days = 180
policy = names
unique_subject = no
copy_extensions = none
[names]
commonName = supplied
[req]
distinguished_name = asked
prompt = no
[asked]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = CA:FALSE
extendedKeyUsage = serverAuth
keyUsage = digitalSignature, keyEncipherment
[client]
basicConstraints = CA:FALSE
extendedKeyUsage = clientAuth
keyUsage = digitalSignature
";

/// The kind of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// RSA of 2,048 bits.
    Rsa,
    /// ECDSA on P-256.
    Ecdsa,
}

/// An authority in a folder.
pub(crate) struct Pki {
    folder: PathBuf,
    keys: Keys,
}

impl Pki {
    /// Makes an authority, and a server's certificate.
    pub(crate) fn new(folder: &Path, keys: Keys) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let pki = Self { folder: folder.to_owned(), keys };
        for (name, text) in [("openssl.cnf", CONFIG), ("index.txt", ""), ("serial", "1001\n")] {
            std::fs::write(folder.join(name), text)?;
        }
        pki.request("ca", &["-x509", "-days", "3650", "-extensions", "authority"], "Easy-RSA CA")?;
        pki.issue("server", "server", "server", 825)?;
        pki.crl(30)?;
        Ok(pki)
    }

    /// Issues a certificate with this common name, in the files NAME.crt and NAME.key.
    pub(crate) fn issue(
        &self,
        name: &str,
        common: &str,
        usage: &str,
        days: u32,
    ) -> anyhow::Result<()> {
        self.request(name, &[], common)?;
        let (request, certificate) = (format!("{name}.csr"), format!("{name}.crt"));
        let days = days.to_string();
        let files = ["-in", &request, "-out", &certificate, "-days", &days, "-extensions", usage];
        self.openssl(&[&["ca", "-batch", "-notext", "-config", "openssl.cnf"], &files[..]].concat())
    }

    /// Issues a certificate that has ended.
    pub(crate) fn issue_expired(&self, name: &str, usage: &str) -> anyhow::Result<()> {
        self.issue_between(name, usage, "20200101000000Z", "20210101000000Z")
    }

    /// Issues a certificate that is good between two times.
    pub(crate) fn issue_between(
        &self,
        name: &str,
        usage: &str,
        from: &str,
        to: &str,
    ) -> anyhow::Result<()> {
        self.request(name, &[], name)?;
        let (request, certificate) = (format!("{name}.csr"), format!("{name}.crt"));
        let times = ["-startdate", from, "-enddate", to];
        let files = ["-in", &request, "-out", &certificate, "-extensions", usage];
        let ca = ["ca", "-batch", "-notext", "-config", "openssl.cnf"];
        self.openssl(&[&ca[..], &times, &files].concat())
    }

    /// Revokes a certificate. The list changes with the next [`Self::crl`].
    pub(crate) fn revoke(&self, name: &str) -> anyhow::Result<()> {
        self.openssl(&["ca", "-config", "openssl.cnf", "-revoke", &format!("{name}.crt")])
    }

    /// Writes the list of revoked certificates, `crl.pem`.
    pub(crate) fn crl(&self, days: u32) -> anyhow::Result<()> {
        let days = days.to_string();
        let words = ["ca", "-config", "openssl.cnf", "-gencrl", "-out", "crl.pem", "-crldays"];
        self.openssl(&[&words[..], &[&days]].concat())
    }

    /// A list that ended long ago, `old.pem`.
    pub(crate) fn old_crl(&self) -> anyhow::Result<()> {
        let words = ["ca", "-config", "openssl.cnf", "-gencrl", "-out", "old.pem"];
        let times = ["-crl_lastupdate", "20200101000000Z", "-crl_nextupdate", "20210101000000Z"];
        self.openssl(&[&words[..], &times].concat())
    }

    /// The text of a file.
    pub(crate) fn text(&self, name: &str) -> anyhow::Result<String> {
        let path = self.folder.join(name);
        std::fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    fn request(&self, name: &str, more: &[&str], common: &str) -> anyhow::Result<()> {
        let (key, subject) = (format!("{name}.key"), format!("/CN={common}"));
        let out = match more.is_empty() {
            true => format!("{name}.csr"),
            false => format!("{name}.crt"),
        };
        let kind = match self.keys {
            Keys::Rsa => &["-newkey", "rsa:2048"][..],
            Keys::Ecdsa => &["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"],
        };
        let files = ["-keyout", &key, "-out", &out, "-subj", &subject];
        let words = ["req", "-new", "-nodes", "-config", "openssl.cnf"];
        self.openssl(&[&words[..], kind, &files, more].concat())
    }

    fn openssl(&self, words: &[&str]) -> anyhow::Result<()> {
        run(&self.folder, "openssl", words)
    }
}

/// Runs a program in a folder.
pub(crate) fn run(folder: &Path, program: &str, words: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    let output = command.args(words).current_dir(folder).output().context(program.to_owned())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {words:?}: {said}");
    Ok(())
}
