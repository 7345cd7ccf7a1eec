//! The file of `ifconfig-pool-persist`: lines `NAME,IPV4[,IPV6]`.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::messages::Topology;

/// Most entries of a file.
pub const POOL_ENTRIES_MAX: usize = 65_536;

/// A client's place in the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolEntry {
    /// The client's name.
    pub name: String,
    /// Its IPv4 address; under net30 the first of its subnet.
    pub ipv4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
}

/// A line is no entry: the file's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the pool file is no NAME,IPV4[,IPV6]: correct or remove it")]
pub struct PoolFileError {
    /// Its number, from 1.
    pub line: usize,
}

impl PoolEntry {
    /// The address that a client had under a topology.
    pub fn client_ipv4(&self, topology: Topology) -> Option<Ipv4Addr> {
        let first = self.ipv4?;
        let behind = if topology == Topology::Net30 { 2 } else { 0 };
        u32::from(first).checked_add(behind).map(Ipv4Addr::from)
    }
}

/// Reads a file. Lines that are no entry come back beside the entries; those beyond the limit are left out.
pub fn read_pool_file(text: &str) -> (Vec<PoolEntry>, Vec<PoolFileError>) {
    let (mut entries, mut errors) = (Vec::new(), Vec::new());
    for (line, content) in (1..).zip(text.lines().map(str::trim)) {
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        if entries.len() + errors.len() == POOL_ENTRIES_MAX {
            break;
        }
        match entry(content) {
            Some(entry) => entries.push(entry),
            None => errors.push(PoolFileError { line }),
        }
    }
    (entries, errors)
}

fn entry(line: &str) -> Option<PoolEntry> {
    let mut fields = line.split(',');
    let name = fields.next().filter(|name| !name.is_empty())?.to_owned();
    let ipv4 = fields.next()?;
    let ipv6 = fields.next().unwrap_or_default();
    if fields.next().is_some() || ipv4.is_empty() && ipv6.is_empty() {
        return None;
    }
    let (mut entry, is_given) =
        (PoolEntry { name, ipv4: None, ipv6: None }, |text: &&str| !text.is_empty());
    entry.ipv4 = Some(ipv4).filter(is_given).map(str::parse).transpose().ok()?;
    entry.ipv6 = Some(ipv6).filter(is_given).map(str::parse).transpose().ok()?;
    Some(entry)
}

/// The text of a file. An entry whose name has a comma or a control character is left out.
pub fn write_pool_file(entries: &[PoolEntry]) -> String {
    let is_plain = |name: &str| {
        !name.is_empty()
            && name.trim() == name
            && !name.starts_with(['#', ';'])
            && !name.chars().any(|char| char == ',' || char.is_control())
    };
    let mut text = String::new();
    for entry in entries.iter().filter(|entry| is_plain(&entry.name)) {
        let ipv4 = entry.ipv4.map(|address| address.to_string()).unwrap_or_default();
        let ipv6 = entry.ipv6.map(|address| address.to_string()).unwrap_or_default();
        text.push_str(&format!("{},{ipv4},{ipv6}\n", entry.name));
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn files_of_openvpn_are_read() {
        let text =
            "# comment\nanna,10.8.0.4,\nberta,10.8.0.8\ncarla,,fd00::1005\nbad,x\n,10.8.0.9\n";
        let (entries, errors) = read_pool_file(text);
        let lines: Vec<usize> = errors.iter().map(|error| error.line).collect();
        assert_eq!((entries.len(), lines), (3, vec![5, 6]));
        let first = |topology| entries[0].client_ipv4(topology).map(|address| address.octets()[3]);
        assert_eq!((first(Topology::Subnet), first(Topology::Net30)), (Some(4), Some(6)));
        assert_eq!(entries[2].ipv6, "fd00::1005".parse().ok());
        let written = write_pool_file(&entries);
        assert_eq!(written, "anna,10.8.0.4,\nberta,10.8.0.8,\ncarla,,fd00::1005\n");
        assert_eq!(read_pool_file(&written), (entries, vec![]));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[ -~\n]{0,120}") {
            let (entries, _) = read_pool_file(&text);
            let whole = entries.iter().all(|entry| entry.name.trim() == entry.name);
            if whole {
                prop_assert_eq!(read_pool_file(&write_pool_file(&entries)), (entries, vec![]));
            }
        }
    }
}
