//! The connected clients as OpenVPN's status has them, in its formats 1 to 3. Readers of other projects know these by
//! their columns, so columns and words are those of OpenVPN 2.6.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::time::{SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use weft_openvpn::device::Traffic;

/// The name of a client, or of its user, that there is none of.
const NONE: &str = "UNDEF";
const CLIENT_COLUMNS: [&str; 12] = [
    "Common Name",
    "Real Address",
    "Virtual Address",
    "Virtual IPv6 Address",
    "Bytes Received",
    "Bytes Sent",
    "Connected Since",
    "Connected Since (time_t)",
    "Username",
    "Client ID",
    "Peer ID",
    "Data Channel Cipher",
];
const ROUTE_COLUMNS: [&str; 5] =
    ["Virtual Address", "Common Name", "Real Address", "Last Ref", "Last Ref (time_t)"];

/// Program and version in front of a status. Readers of it want `OpenVPN`, a version, which is that of the format, and an
/// architecture.
pub(super) fn title() -> String {
    let (arch, version) = (std::env::consts::ARCH, env!("CARGO_PKG_VERSION"));
    format!("OpenVPN 2.6.0 {arch}-linux [Weft {version}]")
}

/// A format of a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// For people.
    One,
    /// Columns with commas between them.
    Two,
    /// Columns with tabs between them.
    Three,
}

/// The connected clients at a time.
#[derive(Clone, Debug)]
pub(super) struct Roster {
    pub(super) at: SystemTime,
    /// The kernel moves their packets.
    pub(super) is_kernel: bool,
    /// In the order of their numbers.
    pub(super) entries: Vec<Entry>,
    /// Bytes outside, from and to all clients since the gateway began.
    pub(super) total: (u64, u64),
}

/// A connected client.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Its number, which is its id for commands, and that of its packets.
    pub(super) number: u32,
    pub(super) name: String,
    pub(super) user: Option<String>,
    pub(super) addresses: Vec<IpAddr>,
    /// Networks behind it.
    pub(super) networks: Vec<IpNet>,
    pub(super) real_address: SocketAddr,
    /// Bytes outside.
    pub(super) link: Traffic,
    pub(super) since: SystemTime,
    pub(super) cipher: &'static str,
}

impl Format {
    /// The format of a number; `None`: there is none.
    pub(super) const fn of(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            3 => Some(Self::Three),
            _ => None,
        }
    }
}

impl Roster {
    /// The status with this behind each line.
    pub(super) fn text(&self, format: Format, line_end: &str) -> String {
        let mut lines = Lines { text: String::new(), separator: ',', line_end };
        match format {
            Format::One => self.plain(&mut lines),
            Format::Two => self.columns(&mut lines),
            Format::Three => {
                lines.separator = '\t';
                self.columns(&mut lines);
            }
        }
        lines.add(&["END"]);
        lines.text
    }

    fn plain(&self, lines: &mut Lines<'_>) {
        lines.add(&["OpenVPN CLIENT LIST"]);
        lines.add(&["Updated", &ascii_time(self.at)]);
        let [name, place, _, _, received, sent, since, ..] = CLIENT_COLUMNS;
        lines.add(&[name, place, received, sent, since]);
        for entry in &self.entries {
            let Entry { name, real_address, link, since, .. } = entry;
            let (received, sent) = (link.rx_bytes.to_string(), link.tx_bytes.to_string());
            lines.add(&[name, &real(*real_address), &received, &sent, &ascii_time(*since)]);
        }
        lines.add(&["ROUTING TABLE"]);
        let [address, name, real_address, seen, _] = ROUTE_COLUMNS;
        lines.add(&[address, name, real_address, seen]);
        self.routes(|route, entry| {
            let Entry { name, real_address, since, .. } = entry;
            lines.add(&[route, name, &real(*real_address), &ascii_time(*since)]);
        });
        lines.add(&["GLOBAL STATS"]);
        lines.add(&["Max bcast/mcast queue length", "0"]);
    }

    fn columns(&self, lines: &mut Lines<'_>) {
        lines.add(&["TITLE", &title()]);
        lines.add(&["TIME", &ascii_time(self.at), &unix_time(self.at)]);
        lines.add(&[&["HEADER", "CLIENT_LIST"], &CLIENT_COLUMNS[..]].concat());
        for entry in &self.entries {
            let Entry { number, name, user, addresses, real_address, link, since, cipher, .. } =
                entry;
            let of = |is_ipv4: bool| {
                let address = addresses.iter().find(|address| address.is_ipv4() == is_ipv4);
                address.map(ToString::to_string).unwrap_or_default()
            };
            let number = number.to_string();
            lines.add(&[
                "CLIENT_LIST",
                name,
                &real(*real_address),
                &of(true),
                &of(false),
                &link.rx_bytes.to_string(),
                &link.tx_bytes.to_string(),
                &ascii_time(*since),
                &unix_time(*since),
                user.as_deref().unwrap_or(NONE),
                &number,
                &number,
                cipher,
            ]);
        }
        lines.add(&[&["HEADER", "ROUTING_TABLE"], &ROUTE_COLUMNS[..]].concat());
        self.routes(|route, entry| {
            let Entry { name, real_address, since, .. } = entry;
            let (ascii, unix) = (ascii_time(*since), unix_time(*since));
            lines.add(&["ROUTING_TABLE", route, name, &real(*real_address), &ascii, &unix]);
        });
        lines.add(&["GLOBAL_STATS", "Max bcast/mcast queue length", "0"]);
        lines.add(&["GLOBAL_STATS", "dco_enabled", if self.is_kernel { "1" } else { "0" }]);
    }

    /// All addresses and networks that lead to a client. No packet notes when it used one, so the time is that of the
    /// connection, as with OpenVPN's own offload.
    fn routes(&self, mut each: impl FnMut(&str, &Entry)) {
        for entry in &self.entries {
            entry.addresses.iter().for_each(|address| each(&address.to_string(), entry));
            entry.networks.iter().for_each(|network| each(&network.to_string(), entry));
        }
    }
}

/// Lines of fields.
struct Lines<'a> {
    text: String,
    separator: char,
    line_end: &'a str,
}

impl Lines<'_> {
    fn add(&mut self, fields: &[&str]) {
        for (index, field) in fields.iter().enumerate() {
            if index > 0 {
                self.text.push(self.separator);
            }
            // A name may have any character, and must not make a line or a column.
            let is_bad = |char: char| char.is_control() || char == self.separator;
            self.text.extend(field.chars().map(|char| if is_bad(char) { '_' } else { char }));
        }
        self.text.push_str(self.line_end);
    }
}

/// Where a client comes from, as OpenVPN 2.6 writes it: an IPv6 address has no port.
pub(super) fn real(address: SocketAddr) -> String {
    match address {
        SocketAddr::V4(address) => address.to_string(),
        SocketAddr::V6(address) => address.ip().to_string(),
    }
}

/// A time in UTC, as `2026-11-30 00:38:13`.
pub(super) fn ascii_time(time: SystemTime) -> String {
    let text = crate::timestamp::format(time);
    text.trim_end_matches('Z').replacen('T', " ", 1)
}

/// Seconds since 1970.
pub(super) fn unix_time(time: SystemTime) -> String {
    let mut text = String::new();
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let _ = write!(text, "{}", since.as_secs());
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;

    fn roster() -> Roster {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let traffic = |rx_bytes, tx_bytes| Traffic { rx_bytes, tx_bytes, ..Traffic::default() };
        let alice = Entry {
            number: 0,
            name: "alice".into(),
            user: None,
            addresses: vec!["10.77.0.2".parse().unwrap(), "fd00:77::1000".parse().unwrap()],
            networks: vec!["192.168.7.0/24".parse().unwrap()],
            real_address: "198.51.9.2:44282".parse().unwrap(),
            link: traffic(2015, 2042),
            since: at(1_795_999_091),
            cipher: "AES-256-GCM",
        };
        let bob = Entry {
            number: 7,
            name: "b,o\nb".into(),
            user: Some("berta".into()),
            addresses: vec!["10.77.0.3".parse().unwrap()],
            networks: Vec::new(),
            real_address: "[2001:db8:9::2]:57200".parse().unwrap(),
            link: traffic(2012, 2041),
            ..alice
        };
        let (at, entries) = (at(1_795_999_093), vec![alice, bob]);
        Roster { at, is_kernel: false, entries, total: (4027, 4083) }
    }

    /// What OpenVPN 2.6.14 wrote of the same two clients, but for the network and what only this client's name has.
    #[test]
    fn the_second_format_is_that_of_openvpn() {
        let title = title();
        let expected = format!(
            "TITLE,{title}
TIME,2026-11-30 00:38:13,1795999093
HEADER,CLIENT_LIST,Common Name,Real Address,Virtual Address,Virtual IPv6 Address,Bytes Received,Bytes Sent,Connected Since,Connected Since (time_t),Username,Client ID,Peer ID,Data Channel Cipher
CLIENT_LIST,alice,198.51.9.2:44282,10.77.0.2,fd00:77::1000,2015,2042,2026-11-30 00:38:11,1795999091,UNDEF,0,0,AES-256-GCM
CLIENT_LIST,b_o_b,2001:db8:9::2,10.77.0.3,,2012,2041,2026-11-30 00:38:11,1795999091,berta,7,7,AES-256-GCM
HEADER,ROUTING_TABLE,Virtual Address,Common Name,Real Address,Last Ref,Last Ref (time_t)
ROUTING_TABLE,10.77.0.2,alice,198.51.9.2:44282,2026-11-30 00:38:11,1795999091
ROUTING_TABLE,fd00:77::1000,alice,198.51.9.2:44282,2026-11-30 00:38:11,1795999091
ROUTING_TABLE,192.168.7.0/24,alice,198.51.9.2:44282,2026-11-30 00:38:11,1795999091
ROUTING_TABLE,10.77.0.3,b_o_b,2001:db8:9::2,2026-11-30 00:38:11,1795999091
GLOBAL_STATS,Max bcast/mcast queue length,0
GLOBAL_STATS,dco_enabled,0
END
"
        );
        assert_eq!(roster().text(Format::Two, "\n"), expected);
        let kernel = Roster { is_kernel: true, ..roster() };
        assert!(kernel.text(Format::Two, "\n").contains("\nGLOBAL_STATS,dco_enabled,1\n"));
    }

    #[test]
    fn the_third_format_has_tabs_where_the_second_has_commas() {
        let mut roster = roster();
        roster.entries[1].name = "bob".into();
        let two = roster.text(Format::Two, "\r\n");
        assert_eq!(roster.text(Format::Three, "\r\n"), two.replace(',', "\t"));
        roster.entries[1].name = "b,o\tb".into();
        assert!(roster.text(Format::Three, "\n").contains("\nCLIENT_LIST\tb,o_b\t"));
    }

    #[test]
    fn the_first_format_is_that_of_openvpn() {
        let expected = "OpenVPN CLIENT LIST
Updated,2026-11-30 00:38:13
Common Name,Real Address,Bytes Received,Bytes Sent,Connected Since
alice,198.51.9.2:44282,2015,2042,2026-11-30 00:38:11
b_o_b,2001:db8:9::2,2012,2041,2026-11-30 00:38:11
ROUTING TABLE
Virtual Address,Common Name,Real Address,Last Ref
10.77.0.2,alice,198.51.9.2:44282,2026-11-30 00:38:11
fd00:77::1000,alice,198.51.9.2:44282,2026-11-30 00:38:11
192.168.7.0/24,alice,198.51.9.2:44282,2026-11-30 00:38:11
10.77.0.3,b_o_b,2001:db8:9::2,2026-11-30 00:38:11
GLOBAL STATS
Max bcast/mcast queue length,0
END
";
        assert_eq!(roster().text(Format::One, "\n"), expected);
    }
}
