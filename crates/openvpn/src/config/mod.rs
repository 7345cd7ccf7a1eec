//! Files of OpenVPN's own: server configurations, client profiles, the files of single clients, pools of addresses.
//!
//! A file is read line by line. Each directive that OpenVPN knows is taken over, or means nothing here, or is refused
//! with the reason: a report says it for every line. Other files are read through [`Files`].

mod ccd;
mod client;
mod lexer;
mod pool_file;
mod profile;
mod pushed;
mod server;
mod table;
mod tls;
mod walk;

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use zeroize::Zeroizing;

use lexer::Directive;

pub use ccd::{ClientFile, PushChange, read_client_file};
pub use client::{
    ClientImport, ClientProfile, Login, PullFilter, Remote, StaticChallenge, read_client_profile,
};
pub use lexer::{BLOCK_BYTES_MAX, CONFIG_BYTES_MAX, DIRECTIVES_MAX, LINE_BYTES_MAX};
pub use pool_file::{POOL_ENTRIES_MAX, PoolEntry, PoolFileError, read_pool_file, write_pool_file};
pub use profile::{NewProfile, ProfileError, Wrapping};
pub use pushed::{PushFault, check_push};
pub use server::{
    Listen, LoginProgram, Management, Rate, ServerImport, ServerSettings, StatusFile,
    TokenSettings, VerifyClientCert, read_server_config,
};
pub use tls::{NameCheck, NameKind, TlsSettings, TlsVersion};
pub use walk::CONFIG_DEPTH_MAX;

/// Reads other files that a configuration names.
pub trait Files {
    /// The content of a file, by its path as it is written.
    ///
    /// # Errors
    /// Why it cannot be read, in words for the user.
    fn read(&mut self, path: &str) -> Result<String, String>;
}

impl<F: FnMut(&str) -> Result<String, String>> Files for F {
    fn read(&mut self, path: &str) -> Result<String, String> {
        self(path)
    }
}

/// What became of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is taken over.
    Taken,
    /// It is left out, and nothing is lost; why.
    NoMeaning(Cow<'static, str>),
    /// It is left out, and something is lost; why, and what to do.
    Refused(Cow<'static, str>),
}

/// A line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportLine {
    /// The file, where it is another than the first (`config`).
    pub file: Option<String>,
    /// The line's number, from 1.
    pub line: usize,
    /// The directive as it is shown: without the content of blocks.
    pub text: String,
    /// What became of it.
    pub verdict: Verdict,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken => f.write_str("taken over"),
            Self::NoMeaning(why) => write!(f, "means nothing here: {why}"),
            Self::Refused(why) => write!(f, "refused: {why}"),
        }
    }
}

impl fmt::Display for ImportLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{file}:")?;
        }
        write!(f, "{}: ", self.line)?;
        if !self.text.is_empty() {
            write!(f, "{}: ", self.text)?;
        }
        write!(f, "{}", self.verdict)
    }
}

/// A transport in a configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Proto {
    /// TCP rather than UDP.
    pub is_tcp: bool,
    /// IPv4 (`Some(false)`) or IPv6 (`Some(true)`) only.
    pub is_ipv6: Option<bool>,
}

impl Proto {
    /// Its name in a configuration.
    pub const fn name(self) -> &'static str {
        match (self.is_tcp, self.is_ipv6) {
            (false, None) => "udp",
            (false, Some(false)) => "udp4",
            (false, Some(true)) => "udp6",
            (true, None) => "tcp",
            (true, Some(false)) => "tcp4",
            (true, Some(true)) => "tcp6",
        }
    }
}

impl FromStr for Proto {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let base = text.strip_suffix("-server").or_else(|| text.strip_suffix("-client"));
        let (is_tcp, family) = match (text.strip_prefix("udp"), base.unwrap_or(text)) {
            (Some(family), _) => (false, family),
            (None, tcp) => (true, tcp.strip_prefix("tcp").ok_or("udp or tcp, with 4 or 6 behind")?),
        };
        let is_ipv6 = match family {
            "" => None,
            "4" => Some(false),
            "6" => Some(true),
            _ => return Err("udp or tcp, with 4 or 6 behind"),
        };
        Ok(Self { is_tcp, is_ipv6 })
    }
}

/// What became of a directive; the error is the reason of a refusal.
type Outcome = Result<Verdict, String>;

/// Taken over.
const TAKEN: Outcome = Ok(Verdict::Taken);

/// Left out without a loss.
const fn nothing(why: &'static str) -> Outcome {
    Ok(Verdict::NoMeaning(Cow::Borrowed(why)))
}

/// The values of a directive, with refusals that name it.
#[derive(Clone, Copy)]
struct Args<'a>(&'a Directive);

impl<'a> Args<'a> {
    fn bad(self, at: usize, expected: &str) -> String {
        let value = self.0.values.get(at).map_or("", String::as_str);
        format!("{} has a bad value {value:?}: it takes {expected}", self.0.name)
    }

    fn text(self, at: usize, expected: &str) -> Result<&'a str, String> {
        let missing = || format!("{} has a value too few: it takes {expected}", self.0.name);
        self.0.values.get(at).map(String::as_str).ok_or_else(missing)
    }

    fn get<T: FromStr>(self, at: usize, expected: &str) -> Result<T, String> {
        self.text(at, expected)?.parse().map_err(|_| self.bad(at, expected))
    }

    fn optional<T: FromStr>(self, at: usize, expected: &str) -> Result<Option<T>, String> {
        if self.0.values.len() > at { self.get(at, expected).map(Some) } else { Ok(None) }
    }

    /// Refuses more than `count` values, as OpenVPN does.
    fn at_most(self, count: usize) -> Result<(), String> {
        if self.0.values.len() > count {
            return Err(format!("{} takes at most {count} values: remove the others", self.0.name));
        }
        Ok(())
    }

    /// The block, or the content of the file that the first value names.
    fn content(self, files: &mut dyn Files) -> Result<Zeroizing<String>, String> {
        if let Some(block) = &self.0.block {
            return Ok(block.clone());
        }
        read(self.text(0, "a file")?, files)
    }
}

/// The content of a file that a line names.
fn read(path: &str, files: &mut dyn Files) -> Result<Zeroizing<String>, String> {
    files.read(path).map(Zeroizing::new).map_err(|error| {
        format!("{path} cannot be read ({error}): restore it, or correct the path")
    })
}

#[cfg(test)]
mod tests;
