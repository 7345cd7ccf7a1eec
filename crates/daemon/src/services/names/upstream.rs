//! The servers that know all other names: from the configuration, or from the host's resolv.conf.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::unix::fs::MetadataExt;

use resolv_conf::{Config, ScopedIp};

/// The host's list of servers.
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The longest such file that is read, in bytes.
const RESOLV_CONF_BYTES_MAX: u64 = 64 * 1024;
/// Upstream servers that are used.
pub(crate) const UPSTREAMS_MAX: usize = 8;
/// The port of name servers.
pub(crate) const DNS_PORT: u16 = 53;

/// The marks by which a changed file is known: device, inode, length, time of change.
type Mark = (u64, u64, u64, i64, i64);

/// The host's resolv.conf, which is read again once it has changed.
#[derive(Default)]
pub(crate) struct ResolvConf {
    /// Of the file as it was read last.
    known: Option<Mark>,
}

impl ResolvConf {
    /// Its servers; `None`: it is as it was, or cannot be read now. `scope` is that of [`parse`].
    pub(crate) fn look(&mut self, scope: impl Fn(&str) -> Option<u32>) -> Option<Vec<SocketAddr>> {
        let mark = std::fs::metadata(RESOLV_CONF)
            .ok()
            .map(|it| (it.dev(), it.ino(), it.size(), it.mtime(), it.mtime_nsec()));
        let read = || -> io::Result<Vec<u8>> {
            let mut text = Vec::new();
            File::open(RESOLV_CONF)?.take(RESOLV_CONF_BYTES_MAX).read_to_end(&mut text)?;
            Ok(text)
        };
        Some(parse(&self.changed(mark, read)?, scope))
    }

    /// The text of a file with this mark, if it is to be read and can be. One that is not there is empty.
    fn changed(
        &mut self,
        mark: Option<Mark>,
        read: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> Option<Vec<u8>> {
        if mark.is_some() && mark == self.known {
            return None;
        }
        match read() {
            Ok(text) => {
                self.known = mark;
                Some(text)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.known = None;
                Some(Vec::new())
            }
            // The next look tries again.
            Err(error) => {
                tracing::debug!(%error, "{RESOLV_CONF} cannot be read");
                None
            }
        }
    }
}

/// The servers of a resolv.conf, in their order. Lines that cannot be read are left out. `scope` gives the index of
/// an interface named behind a link-local address.
pub(crate) fn parse(text: &[u8], scope: impl Fn(&str) -> Option<u32>) -> Vec<SocketAddr> {
    let (config, _) = Config::parse_with_errors(text);
    let address = |server: &ScopedIp| match server {
        ScopedIp::V4(address) => Some(SocketAddr::new((*address).into(), DNS_PORT)),
        ScopedIp::V6(address, None) => Some(SocketAddr::new((*address).into(), DNS_PORT)),
        ScopedIp::V6(address, Some(name)) => {
            let index = name.parse().ok().or_else(|| scope(name))?;
            Some(SocketAddrV6::new(*address, DNS_PORT, 0, index).into())
        }
    };
    config.nameservers.iter().filter_map(address).collect()
}

/// The servers that may be asked: each once, none that is this daemon, at most [`UPSTREAMS_MAX`]. Also returns
/// those left out because they are this daemon.
pub(crate) fn usable(
    servers: &[SocketAddr],
    own: &BTreeSet<SocketAddr>,
) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
    let (mut kept, mut loops) = (Vec::new(), Vec::new());
    for server in servers {
        let server = SocketAddr::new(server.ip().to_canonical(), server.port());
        let fits = |ip: IpAddr| !ip.is_multicast() && server.port() != 0;
        // 0.0.0.0 is this host, as in glibc.
        let ip = match server.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::from([127, 0, 0, 1]),
            ip => ip,
        };
        let target = match (ip, server) {
            (IpAddr::V6(_), SocketAddr::V6(_)) => server,
            _ => SocketAddr::new(ip, server.port()),
        };
        if own.iter().any(|it| it.ip() == ip && it.port() == server.port()) {
            loops.push(target);
        } else if fits(ip) && !kept.contains(&target) && kept.len() < UPSTREAMS_MAX {
            kept.push(target);
        }
    }
    (kept, loops)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn servers_come_in_their_order_and_bad_lines_are_left_out() {
        let text = b"# a comment\nsearch example.org\nnameserver 192.0.2.1\nnameserver\n\
            nameserver nonsense\nnameserver 2001:db8::1\noptions ndots:x\n\xff\xfe\n\
            nameserver fe80::1%eth0\nnameserver fe80::2%7\nnameserver fe80::3%none\n";
        let scope = |name: &str| (name == "eth0").then_some(3);
        let wanted = ["192.0.2.1:53", "[2001:db8::1]:53", "[fe80::1%3]:53", "[fe80::2%7]:53"];
        assert_eq!(parse(text, scope), addresses(&wanted));
        assert_eq!(parse(b"", scope), []);
    }

    #[test]
    fn a_resolv_conf_that_cannot_be_read_is_read_at_the_next_look() {
        let mut file = ResolvConf::default();
        let (before, after) = (Some((1, 2, 3, 4, 5)), Some((1, 2, 3, 4, 6)));
        let text = || -> io::Result<_> { Ok(b"nameserver 192.0.2.1\n".to_vec()) };
        let fails = || Err(io::Error::other("no descriptor is left"));
        for mark in [before, after] {
            assert_eq!(file.changed(mark, fails), None);
            assert_eq!(file.changed(mark, text), text().ok());
            assert_eq!(file.changed(mark, || panic!("it is as it was")), None);
        }
        // One that is gone names none, and one that comes back is read, though it is the same.
        let gone = || Err(io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(file.changed(None, gone), Some(Vec::new()));
        assert_eq!(file.changed(after, text), text().ok());
    }

    #[test]
    fn this_daemon_is_never_its_own_upstream_and_the_list_is_bounded() {
        let own: BTreeSet<SocketAddr> =
            addresses(&["172.17.0.1:53", "127.0.0.1:53"]).into_iter().collect();
        let all = [
            "192.0.2.1:53",
            "172.17.0.1:53",
            "192.0.2.1:53",
            "[::ffff:172.17.0.1]:53",
            "0.0.0.0:53",
        ];
        let (kept, loops) = usable(&addresses(&all), &own);
        assert_eq!(kept, addresses(&["192.0.2.1:53"]));
        assert_eq!(loops.len(), 3);
        let many: Vec<SocketAddr> =
            (1..100).map(|n| SocketAddr::from(([192, 0, 2, n], 53))).collect();
        assert_eq!(usable(&many, &own).0.len(), UPSTREAMS_MAX);
        assert_eq!(usable(&addresses(&["224.0.0.1:53", "192.0.2.1:0"]), &own).0, []);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(text in proptest::collection::vec(any::<u8>(), 0..2_000)) {
            parse(&text, |_| Some(1));
        }

        #[test]
        fn no_words_make_the_parser_panic(
            lines in proptest::collection::vec("(nameserver|options|search|sortlist|domain|lookup|family) [ -~]{0,60}", 0..20)
        ) {
            parse(lines.join("\n").as_bytes(), |_| None);
        }
    }
}
