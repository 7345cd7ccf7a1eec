//! The places that profiles name: `[udp:|tcp:]HOST[:PORT]`, as `--remote` gives them.

use weft_api::{Listen, Protocol};

use super::sockets::{PORT, default_listen};

/// A server of a profile: host, port, and whether over TCP.
pub(super) type Remote = (String, u16, bool);

/// A place without what it leaves open.
struct Place<'a> {
    protocol: Option<Protocol>,
    host: &'a str,
    port: Option<u16>,
}

/// The servers of a profile: each place by the protocols and ports that are listened on, where it says no others. UDP
/// comes first: over TCP, a lost packet holds up all that follow.
pub(super) fn remotes(places: &[String], listen: &[Listen]) -> Vec<Remote> {
    let default = [default_listen()];
    let listen = if listen.is_empty() { &default[..] } else { listen };
    let mut all = Vec::new();
    for protocol in [Protocol::Udp, Protocol::Tcp] {
        for place in places.iter().filter_map(|text| parse(text)) {
            if let Some(port) = port_of(&place, protocol, listen) {
                let remote = (place.host.to_owned(), port, protocol == Protocol::Tcp);
                if !all.contains(&remote) {
                    all.push(remote);
                }
            }
        }
    }
    all
}

/// Whether a profile can name this place.
pub(super) fn is_place(text: &str) -> bool {
    parse(text).is_some()
}

/// A server of a profile, as another gateway is told of it.
pub(super) fn told((host, port, is_tcp): &Remote) -> String {
    let protocol = if *is_tcp { "tcp" } else { "udp" };
    match host.contains(':') {
        true => format!("{protocol}:[{host}]:{port}"),
        false => format!("{protocol}:{host}:{port}"),
    }
}

/// A server of which another gateway has told; `None`: a profile cannot name it.
pub(super) fn heard(text: &str) -> Option<Remote> {
    let place = parse(text)?;
    let is_tcp = place.protocol == Some(Protocol::Tcp);
    Some((place.host.to_owned(), place.port.unwrap_or(PORT), is_tcp))
}

/// The port of a place by a protocol; `None`: it is not reached by that.
fn port_of(place: &Place<'_>, protocol: Protocol, listen: &[Listen]) -> Option<u16> {
    let of = |protocol| listen.iter().filter(move |it| it.protocol == protocol).map(|it| it.port);
    match (place.protocol, place.port) {
        (Some(other), _) if other != protocol => None,
        (Some(_), port) => port.or_else(|| of(protocol).next()).or(Some(PORT)),
        (None, None) => of(protocol).next(),
        (None, Some(port)) => {
            let is_here = listen.iter().any(|it| it.port == port);
            // A port that nobody listens on is passed on by somebody, to the first protocol.
            let is_passed_on = match protocol {
                Protocol::Udp => of(Protocol::Udp).next().is_some(),
                Protocol::Tcp => of(Protocol::Udp).next().is_none(),
            };
            let fits = if is_here { of(protocol).any(|it| it == port) } else { is_passed_on };
            fits.then_some(port)
        }
    }
}

/// An IPv6 address with a port is in brackets.
fn parse(text: &str) -> Option<Place<'_>> {
    let (protocol, place) = Protocol::split(text);
    let (host, port) = match place.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':')?)),
        None => match place.rsplit_once(':').filter(|(host, _)| !host.contains(':')) {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    let port = match port {
        Some(port) => Some(port.parse().ok().filter(|port| *port > 0)?),
        None => None,
    };
    let is_fit = |char: char| char.is_ascii_alphanumeric() || ".-_:%".contains(char);
    let is_host = !host.is_empty() && host.len() <= 253 && host.chars().all(is_fit);
    is_host.then_some(Place { protocol, host, port })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn servers(places: &[&str], listen: &[&str]) -> Vec<String> {
        let places: Vec<String> = places.iter().map(|it| (*it).to_owned()).collect();
        let listen: Vec<Listen> = listen.iter().map(|it| it.parse().unwrap()).collect();
        let shown = |(host, port, is_tcp): Remote| {
            format!("{host} {port} {}", if is_tcp { "tcp" } else { "udp" })
        };
        remotes(&places, &listen).into_iter().map(shown).collect()
    }

    #[test]
    fn a_place_is_reached_by_all_that_is_listened_on_udp_first() {
        assert_eq!(servers(&["vpn.example"], &[]), ["vpn.example 1194 udp"]);
        let both = ["tcp:443", "udp:192.0.2.1:1195"];
        assert_eq!(
            servers(&["a", "b"], &both),
            ["a 1195 udp", "b 1195 udp", "a 443 tcp", "b 443 tcp"]
        );
        assert_eq!(servers(&["a"], &["tcp:443"]), ["a 443 tcp"]);
        assert_eq!(servers(&["a:443"], &both), ["a 443 tcp"], "that port is TCP's");
        assert_eq!(servers(&["a:5"], &both), ["a 5 udp"], "somebody passes it on");
        assert_eq!(servers(&["a:5"], &["tcp:443"]), ["a 5 tcp"]);
        assert_eq!(servers(&["a:7"], &["7", "tcp:7"]), ["a 7 udp", "a 7 tcp"]);
        assert_eq!(
            servers(&["tcp:a:8", "a", "udp:a"], &both),
            ["a 1195 udp", "a 8 tcp", "a 443 tcp"]
        );
        let expected = ["2001:db8::2 1196 udp", "2001:db8::1 443 tcp"];
        assert_eq!(servers(&["tcp:[2001:db8::1]", "udp:[2001:db8::2]:1196"], &both), expected);
        assert_eq!(servers(&["2001:db8::1"], &[]), ["2001:db8::1 1194 udp"]);
    }

    #[test]
    fn a_server_told_to_another_gateway_is_the_same_there() {
        for text in ["udp:vpn.example:1194", "tcp:[2001:db8::1]:443", "udp:192.0.2.1:1"] {
            assert_eq!(told(&heard(text).unwrap()), text);
        }
        assert_eq!(heard("vpn.example"), Some(("vpn.example".into(), PORT, false)));
        assert_eq!(heard("a b"), None);
    }

    #[test]
    fn a_place_that_would_break_the_profile_is_none() {
        for place in
            ["vpn.example", "10.0.0.1:1194", "[fd00::1]:5", "fe80::1%eth0", "tcp:a", "udp:a:1"]
        {
            assert!(is_place(place), "{place}");
        }
        for place in [
            "",
            "a b",
            "a\nscript-security 2",
            ":1194",
            "host:0",
            "\"x\"",
            "tcp:",
            "[::1]5",
            "a:b:",
        ] {
            // A text with several colons and no brackets is an address of IPv6.
            assert_eq!(is_place(place), place == "a:b:", "{place}");
        }
    }
}
