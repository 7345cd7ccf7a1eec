//! The servers that know all other names: from the configuration, or from the host's resolv.conf.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use resolv_conf::{Config, ScopedIp};

/// The host's list of servers.
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The longest such file that is read, in bytes.
pub(crate) const RESOLV_CONF_BYTES_MAX: u64 = 64 * 1024;
/// Upstream servers that are used.
pub(crate) const UPSTREAMS_MAX: usize = 8;
/// The port of name servers.
pub(crate) const DNS_PORT: u16 = 53;

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
