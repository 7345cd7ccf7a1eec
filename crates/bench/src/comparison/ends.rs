//! The two ends of a tunnel between the hosts: addresses, files and commands.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use crate::sandbox::{Netns, Sandbox, SandboxError};

/// The commands for both ends of a tunnel.
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// The program's version.
    pub(super) version: Option<String>,
    /// The command of each end.
    pub(super) commands: [Vec<String>; 2],
    /// A command for each end once its program runs; empty: none.
    pub(super) configure: [Vec<String>; 2],
    /// A command that both ends need, on the second host; empty: none.
    pub(super) beside: Vec<String>,
    /// The second end's address, where the program gives its device address and MTU itself.
    pub(super) own_address: Option<IpAddr>,
}

/// The settings of one end.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// Its number and the other end's, 1 and 2.
    pub(super) numbers: [usize; 2],
    pub(super) device: &'static str,
    /// The device's MTU, bytes.
    pub(super) mtu: u32,
    /// Its address on the link and the other end's.
    pub(super) outer: [Ipv4Addr; 2],
    /// Its address inside and the other end's.
    pub(super) inner: [Ipv4Addr; 2],
}

/// The two ends of a tunnel, in the hosts' namespaces.
pub(super) struct Ends<'a> {
    pub(super) sandbox: &'a Sandbox,
    /// The row's name.
    pub(super) row: &'static str,
    pub(super) device: &'static str,
    /// Third byte of the benchmark addresses inside.
    pub(super) subnet: u8,
    /// The device's MTU, bytes.
    pub(super) mtu: u32,
}

impl Ends<'_> {
    pub(super) fn end(&self, index: usize) -> End {
        let outer = |index| self.sandbox.host(index).ipv4();
        let inner = |index| inner(self.subnet, index);
        End {
            numbers: [index + 1, 2 - index],
            device: self.device,
            mtu: self.mtu,
            outer: [outer(index), outer(1 - index)],
            inner: [inner(index), inner(1 - index)],
        }
    }

    pub(super) fn netns(&self, index: usize) -> &Netns {
        self.sandbox.host(index).netns()
    }

    /// A file or directory of one end, which goes with the sandbox.
    pub(super) fn file(&self, index: usize, kind: &str) -> PathBuf {
        self.sandbox.directory().join(format!("{}{}.{kind}", self.row, index + 1))
    }

    /// Makes a directory of one end.
    pub(super) fn directory(&self, index: usize, kind: &str) -> Result<PathBuf, SandboxError> {
        let path = self.file(index, kind);
        let made = std::fs::create_dir_all(&path);
        made.map_err(SandboxError::io(format!("make {}", path.display())))?;
        Ok(path)
    }

    /// The password of this run.
    pub(super) fn password(&self) -> Result<String, SandboxError> {
        let text = std::fs::read_to_string(self.sandbox.password_file());
        let text = text.map_err(SandboxError::io("read the password of this run"))?;
        Ok(text.trim().to_owned())
    }
}

/// Benchmark addresses (RFC 2544's 198.18.0.0/15), inside the sandbox's namespaces only.
const fn inner(subnet: u8, index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, subnet, if index == 0 { 1 } else { 2 })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The first end of a tunnel, as the texts of its programs are tested with.
    pub(in super::super) const END: End = End {
        numbers: [1, 2],
        device: "dev0",
        mtu: 1_420,
        outer: [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)],
        inner: [inner(12, 0), inner(12, 1)],
    };
}
