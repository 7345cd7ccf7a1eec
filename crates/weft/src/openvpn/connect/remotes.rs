//! Which server is tried next, and after which pause. It sees no socket and no clock.

use std::net::SocketAddr;
use std::time::Duration;

use weft_openvpn::config::{ClientProfile, Proto};
use weft_openvpn::messages::Advance;

/// The pause before the second round over all servers, unless the profile says otherwise, in seconds.
const PAUSE_DEFAULT_S: u64 = 1;
/// The longest pause that grows by itself, in seconds.
const PAUSE_MAX_S: u64 = 60;

/// A server of the profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) proto: Proto,
}

/// What comes after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The next attempt, after this pause.
    Attempt(Duration),
    /// All attempts that the profile allows are used up.
    GiveUp(u32),
}

/// The servers in the order in which they are tried, and how far the trying is.
#[derive(Debug)]
pub(super) struct Rotation {
    servers: Vec<Server>,
    at: usize,
    /// Which address of the server.
    address: usize,
    /// Rounds over all servers since the last connection.
    rounds: u32,
    first_pause: Duration,
    rounds_max: Option<u32>,
}

impl Rotation {
    /// The servers of a profile; `None`: it has none that may be tried. `random` gives a number below its argument.
    pub(super) fn new(
        profile: &ClientProfile,
        mut random: impl FnMut(usize) -> usize,
    ) -> Option<Self> {
        let server = |remote| {
            let (port, proto) = profile.target(remote);
            Server { host: remote.host.clone(), port, proto }
        };
        let is_allowed =
            |server: &Server| profile.only_tcp.is_none_or(|is_tcp| is_tcp == server.proto.is_tcp);
        let mut servers: Vec<Server> =
            profile.remotes.iter().map(server).filter(is_allowed).collect();
        if profile.is_random {
            for last in (1..servers.len()).rev() {
                servers.swap(last, random(last + 1).min(last));
            }
        }
        let pause_s = profile.connect_retry_s.map_or(PAUSE_DEFAULT_S, u64::from).max(1);
        (!servers.is_empty()).then_some(Self {
            servers,
            at: 0,
            address: 0,
            rounds: 0,
            first_pause: Duration::from_secs(pause_s),
            rounds_max: profile.attempts_max.filter(|most| *most > 0),
        })
    }

    /// The server to try.
    pub(super) fn server(&self) -> &Server {
        &self.servers[self.at]
    }

    /// The address to try, among those of the server's name; `None`: it has none of its transport's family.
    pub(super) fn address(&self, found: &[SocketAddr]) -> Option<SocketAddr> {
        let usable = usable(self.server(), found);
        usable.get(self.address).or(usable.first()).copied()
    }

    /// There was a connection, so that trying begins anew: with this server.
    pub(super) const fn connected(&mut self) {
        self.rounds = 0;
    }

    /// Goes on after an attempt or a connection: to the next address of the name as long as there is one, then to the
    /// next server, or as the server said. Each round over all servers has a longer pause behind it.
    pub(super) fn advance(&mut self, found: &[SocketAddr], how: Advance) -> Next {
        let more = self.address + 1 < usable(self.server(), found).len();
        match how {
            Advance::No => return self.end_round(),
            Advance::Address if more => {
                self.address += 1;
                return Next::Attempt(Duration::ZERO);
            }
            Advance::Address | Advance::Remote => {}
        }
        self.address = 0;
        self.at = (self.at + 1) % self.servers.len();
        if self.at == 0 { self.end_round() } else { Next::Attempt(Duration::ZERO) }
    }

    fn end_round(&mut self) -> Next {
        self.rounds += 1;
        if self.rounds_max.is_some_and(|most| self.rounds >= most) {
            return Next::GiveUp(self.rounds);
        }
        let most = Duration::from_secs(PAUSE_MAX_S).max(self.first_pause);
        let doubled =
            1_u32.checked_shl(self.rounds - 1).and_then(|by| self.first_pause.checked_mul(by));
        Next::Attempt(doubled.map_or(most, |pause| pause.min(most)))
    }
}

fn usable(server: &Server, found: &[SocketAddr]) -> Vec<SocketAddr> {
    let fits = |address: &&SocketAddr| {
        server.proto.is_ipv6.is_none_or(|is_ipv6| is_ipv6 == address.is_ipv6())
    };
    found.iter().filter(fits).copied().collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_openvpn::config::Remote;

    use super::*;

    fn profile(remotes: &[(&str, &str)]) -> ClientProfile {
        let remote = |(host, proto): &(&str, &str)| Remote {
            host: (*host).to_owned(),
            port: None,
            proto: Some(proto.parse().unwrap()),
        };
        ClientProfile { remotes: remotes.iter().map(remote).collect(), ..ClientProfile::default() }
    }

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|text| text.parse().unwrap()).collect()
    }

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn addresses_of_a_name_come_before_the_next_server_and_pauses_grow() {
        let mut rotation = Rotation::new(&profile(&[("a", "udp"), ("b", "tcp4")]), |_| 0).unwrap();
        let two = addresses(&["192.0.2.1:1194", "[2001:db8::1]:1194"]);
        assert_eq!(rotation.address(&two), Some(two[0]));
        assert_eq!(rotation.advance(&two, Advance::Address), Next::Attempt(Duration::ZERO));
        assert_eq!(rotation.address(&two), Some(two[1]));
        assert_eq!(rotation.advance(&two, Advance::Address), Next::Attempt(Duration::ZERO));
        assert_eq!((rotation.server().host.as_str(), rotation.address(&two)), ("b", Some(two[0])));
        assert_eq!(rotation.address(&two[1..]), None, "tcp4 takes no IPv6 address");
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(rotation.server().host, "b");
            assert_eq!(rotation.advance(&[], Advance::Address), Next::Attempt(S * pause));
            assert_eq!(rotation.advance(&[], Advance::Remote), Next::Attempt(Duration::ZERO));
        }
        rotation.connected();
        assert_eq!(rotation.advance(&[], Advance::No), Next::Attempt(S));
        assert_eq!(rotation.server().host, "b");
    }

    #[test]
    fn the_profile_limits_attempts_and_transports() {
        let mut limited = profile(&[("a", "udp"), ("b", "tcp")]);
        limited.attempts_max = Some(2);
        limited.only_tcp = Some(true);
        let mut rotation = Rotation::new(&limited, |_| 0).unwrap();
        assert_eq!(rotation.server().host, "b");
        assert_eq!(rotation.advance(&[], Advance::Address), Next::Attempt(S));
        assert_eq!(rotation.advance(&[], Advance::Address), Next::GiveUp(2));
        limited.remotes.pop();
        assert!(Rotation::new(&limited, |_| 0).is_none());
    }

    #[test]
    fn a_random_order_has_all_servers() {
        let mut mixed = profile(&[("a", "udp"), ("b", "udp"), ("c", "udp")]);
        mixed.is_random = true;
        let rotation = Rotation::new(&mixed, |_| 0).unwrap();
        let names: Vec<&str> = rotation.servers.iter().map(|server| server.host.as_str()).collect();
        assert_eq!(names, ["b", "c", "a"]);
    }
}
