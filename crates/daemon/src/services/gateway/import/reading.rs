//! What becomes of each line of a server's configuration on this gateway: what the reader of the file takes, and what
//! the gateway does with it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_api::ImportedLine;
use weft_openvpn::config::{
    ClientFile, ImportLine, PushChange, ServerImport, ServerSettings, Verdict, VerifyClientCert,
    read_client_file, read_server_config,
};
use weft_openvpn::messages::Topology;
use weft_openvpn::wrap::AuthDigest;

use super::logins::{self, has_login};
use super::{Saved, watching};
use crate::services::gateway::push::redirects;

/// The file of clients without one of their own.
pub(super) const DEFAULT_FILE: &str = "DEFAULT";
/// Directives that decide who is let in: an import never leaves them out.
const DECIDERS: [&str; 30] = [
    "auth-user-pass-verify",
    "ca",
    "capath",
    "ccd-exclusive",
    "cert",
    "client-cert-not-required",
    "client-config-dir",
    "client-connect",
    "config",
    "crl-verify",
    "key",
    "management-client-auth",
    "ns-cert-type",
    "peer-fingerprint",
    "plugin",
    "remote-cert-eku",
    "remote-cert-ku",
    "remote-cert-tls",
    "server",
    "tls-auth",
    "tls-crypt",
    "tls-crypt-v2",
    "tls-crypt-v2-max-age",
    "tls-crypt-v2-verify",
    "tls-remote",
    "tls-verify",
    "verify-client-cert",
    "verify-hash",
    "verify-x509-name",
    "x509-username-field",
];
const NO_PASSWORDS: &str = "the server asks for no passwords";

/// A configuration with the files of its clients, as it was read.
pub(super) struct Reading {
    pub(super) settings: ServerSettings,
    pub(super) lines: Vec<ImportedLine>,
    pub(super) faults: Vec<String>,
    /// By the names of the files.
    pub(super) clients: BTreeMap<String, ClientFile>,
}

impl Reading {
    /// Reads a configuration.
    pub(super) fn of(saved: &Saved) -> Self {
        let mut files = |path: &str| saved.read(path);
        let ServerImport { settings, lines, missing } =
            read_server_config(&saved.config, &mut files);
        let has_program = saved.auth_program.is_some();
        let lines =
            lines.into_iter().map(|line| noted(judged(line, &settings, has_program), &settings));
        let lines: Vec<ImportedLine> = lines.collect();
        let settings = kept(settings, &lines);
        let mut reading = Self {
            settings,
            lines,
            faults: missing.into_iter().map(str::to_owned).collect(),
            clients: BTreeMap::new(),
        };
        reading.faults.extend(reading.own_faults());
        if let Some(folder) = reading.settings.client_folder.clone() {
            reading.read_clients(saved, &folder);
        }
        reading
    }

    /// The range of clients' addresses.
    pub(super) fn range(&self) -> Option<Ipv4Net> {
        let (address, mask) = self.settings.ipv4.or(self.settings.own_ipv4)?;
        Some(Ipv4Net::with_netmask(address, mask).ok()?.trunc())
    }

    /// The IPv6 range of clients' addresses.
    pub(super) fn range6(&self) -> Option<Ipv6Net> {
        let (address, bits) = self.settings.ipv6.or(self.settings.own_ipv6)?;
        Ipv6Net::new(address, bits).ok().map(|net| net.trunc())
    }

    /// The lines that are refused and stand in the way: all, or only those that decide who is let in.
    pub(super) fn in_the_way(&self, without_refused: bool) -> usize {
        let counts = |line: &&ImportedLine| {
            // Nobody knows what a line says that cannot be read.
            let is_decider = line.file.is_some()
                || line.text.is_empty()
                || DECIDERS.contains(&name_of(&line.text));
            line.verdict == REFUSED && (is_decider || !without_refused)
        };
        self.lines.iter().filter(counts).count()
    }

    /// Whether some clients are to reach all else through this host.
    pub(super) fn leads_out(&self) -> bool {
        all_pushes(&self.settings, &self.clients).any(|option| redirects(option))
    }

    /// The fixed address of each client.
    pub(super) fn fixed(&self) -> impl Iterator<Item = (&str, Ipv4Addr)> {
        self.clients.iter().filter_map(|(name, file)| Some((name.as_str(), file.ipv4?.0)))
    }

    /// Refuses the fixed addresses that cannot be given on a network where this host has the address `own`.
    pub(super) fn check_addresses(&mut self, network: Ipv4Net, own: Ipv4Addr) {
        let mut holders: BTreeMap<Ipv4Addr, String> = BTreeMap::new();
        let mut refused = Vec::new();
        for (name, file) in &self.clients {
            let Some((address, _)) = file.ipv4 else { continue };
            let outside = file.address_fault(network.addr(), network.prefix_len(), own);
            let why = match (outside, holders.get(&address)) {
                (Some(why), _) => why,
                (None, _) if name == DEFAULT_FILE => {
                    "all clients without a file would have this address: remove it".to_owned()
                }
                (None, Some(other)) => {
                    format!("{address} is the address of {other}, too: give one of them another")
                }
                (None, None) => {
                    holders.insert(address, name.clone());
                    continue;
                }
            };
            refused.push((name.clone(), "ifconfig-push", why));
        }
        refused.extend(self.networks_given_twice());
        for (name, directive, why) in refused {
            self.refuse(&name, directive, why);
        }
    }

    /// Refuses an IPv6 range that is not the network's.
    pub(super) fn check_range6(&mut self, network: &str, range: Option<Ipv6Net>) {
        let Some(wanted) = self.range6().filter(|wanted| Some(*wanted) != range) else { return };
        let is_it = |line: &&mut ImportedLine| {
            line.verdict == TAKEN && matches!(name_of(&line.text), "server-ipv6" | "ifconfig-ipv6")
        };
        let has = range.map_or_else(|| "none".to_owned(), |range| range.to_string());
        for line in self.lines.iter_mut().filter(is_it) {
            line.verdict = REFUSED.to_owned();
            line.reason = Some(format!(
                "the IPv6 range of network {network} is {has}, not {wanted}: remove the line, or name another network"
            ));
        }
    }

    /// Networks that two clients are said to have behind them.
    fn networks_given_twice(&self) -> Vec<(String, &'static str, String)> {
        let mut holders: BTreeMap<IpNet, &str> = BTreeMap::new();
        let mut refused = Vec::new();
        for (name, file) in &self.clients {
            for network in networks_of(file) {
                match holders.get(&network) {
                    Some(other) if *other != name => refused.push((
                        name.clone(),
                        "iroute",
                        format!("{network} is behind {other}, too: remove it from one of them"),
                    )),
                    _ => _ = holders.insert(network, name),
                }
            }
        }
        refused
    }

    /// Refuses a line of a client's file that was taken.
    fn refuse(&mut self, name: &str, directive: &str, why: String) {
        let place = self.settings.client_folder.as_deref().map(|folder| format!("{folder}/{name}"));
        let is_it = |line: &&mut ImportedLine| {
            line.file == place && line.verdict == TAKEN && name_of(&line.text) == directive
        };
        match self.lines.iter_mut().find(is_it) {
            Some(line) => {
                line.verdict = REFUSED.to_owned();
                line.reason = Some(why);
            }
            None => self.faults.push(format!("{name}: {why}")),
        }
    }

    fn read_clients(&mut self, saved: &Saved, folder: &str) {
        if let Some(why) = saved.unread.get(folder) {
            self.faults.push(format!("client-config-dir {folder} cannot be read ({why})"));
        }
        for (name, text) in &saved.client_files {
            let mut files = |path: &str| saved.read(path);
            let (file, lines) = read_client_file(text, &mut files);
            let place = format!("{folder}/{name}");
            let lines = lines.into_iter().map(|line| {
                let file = Some(line.file.clone().unwrap_or_else(|| place.clone()));
                shown(judged_of_client(ImportLine { file, ..line }))
            });
            self.lines.extend(lines);
            self.clients.insert(name.clone(), file);
        }
        let unread = saved.unread.iter().filter(|(path, _)| is_in(path, folder));
        let unread = unread.map(|(path, why)| format!("{path} cannot be read ({why})"));
        self.faults.extend(unread.collect::<Vec<_>>());
    }

    /// Faults that only the whole shows.
    fn own_faults(&self) -> Vec<String> {
        let ServerSettings { tls, ping_s, .. } = &self.settings;
        let (ping, restart) = pings(&self.settings);
        let digest = tls.auth_digest.parse::<AuthDigest>();
        let all = [
            (
                tls.tls_auth.is_some() && tls.tls_crypt.is_some(),
                "tls-auth and tls-crypt exclude each other: remove one",
            ),
            (tls.tls_auth.is_some() && digest.is_err(), "tls-auth needs a digest: correct auth"),
            (
                tls.ca.is_none() && !tls.fingerprints.is_empty(),
                "peer-fingerprint without ca: clients are known by an authority here, add ca FILE",
            ),
            (
                self.range().is_none() && self.settings.ipv6.is_some(),
                "clients have no IPv4 addresses: add server NETWORK MASK",
            ),
            (
                *ping_s > 0 && (restart <= ping || restart > super::super::PING_MAX_S),
                "the times of keepalive do not fit: 0 < ping < ping-restart <= 3600 seconds",
            ),
        ];
        all.into_iter().filter(|(is_fault, _)| *is_fault).map(|(_, why)| why.to_owned()).collect()
    }
}

const TAKEN: &str = "taken";
const REFUSED: &str = "refused";

/// All options that some clients are pushed.
pub(super) fn all_pushes<'a>(
    settings: &'a ServerSettings,
    clients: &'a BTreeMap<String, ClientFile>,
) -> impl Iterator<Item = &'a String> {
    let of_files = clients.values().flat_map(|file| &file.pushes);
    let of_files = of_files.filter_map(|change| match change {
        PushChange::Add(option) => Some(option),
        PushChange::Remove(_) | PushChange::Reset => None,
    });
    settings.pushes.iter().chain(of_files)
}

/// The networks behind a client.
pub(super) fn networks_of(file: &ClientFile) -> Vec<IpNet> {
    let ipv4 = file.networks_ipv4.iter().map(|(address, bits)| (IpAddr::V4(*address), *bits));
    let ipv6 = file.networks_ipv6.iter().map(|(address, bits)| (IpAddr::V6(*address), *bits));
    let all = ipv4.chain(ipv6).filter_map(|(address, bits)| IpNet::new(address, bits).ok());
    all.map(|net| net.trunc()).collect()
}

/// The clients' times: seconds until a ping, and until a new connection. 0: the configuration has none.
pub(super) fn pings(settings: &ServerSettings) -> (u32, u32) {
    let pushed = settings.pushes.iter().rev().find_map(|option| {
        option.strip_prefix("ping-restart ").and_then(|seconds| seconds.trim().parse().ok())
    });
    (settings.ping_s, pushed.unwrap_or(settings.ping_restart_s))
}

/// What a configuration says to this gateway: without those of its lines that the reader has taken, and the gateway
/// refuses.
fn kept(mut settings: ServerSettings, lines: &[ImportedLine]) -> ServerSettings {
    let is_refused = |names: &[&str]| {
        let mut refused = lines.iter().filter(|line| line.verdict == REFUSED);
        refused.any(|line| names.contains(&name_of(&line.text)))
    };
    if is_refused(&["auth-gen-token"]) {
        settings.tokens = None;
    }
    if is_refused(&["server-ipv6", "ifconfig-ipv6"]) {
        (settings.ipv6, settings.own_ipv6) = (None, None);
    }
    settings.allows_duplicates |= logins::has_no_names(&settings);
    settings
}

fn is_in(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

/// The directive of a line; of `setenv opt`, the one behind that.
fn name_of(text: &str) -> &str {
    let text = text.strip_prefix("setenv opt ").unwrap_or(text);
    let name = text.split_whitespace().next().unwrap_or_default();
    name.trim_start_matches('<').trim_end_matches('>')
}

fn shown(line: ImportLine) -> ImportedLine {
    let ImportLine { file, line, text, verdict } = line;
    let (verdict, reason) = match verdict {
        Verdict::Taken => (TAKEN, None),
        Verdict::NoMeaning(why) => ("nothing", Some(why)),
        Verdict::Refused(why) => (REFUSED, Some(why)),
    };
    let reason = reason.map(Cow::into_owned);
    ImportedLine { file, line, text, verdict: verdict.to_owned(), reason }
}

/// A line with what is to be known of one that is taken.
fn noted(line: ImportLine, settings: &ServerSettings) -> ImportedLine {
    let name = name_of(&line.text);
    let note = watching::note(name, settings).or_else(|| logins::note(name, settings));
    let line = shown(line);
    match line.verdict == TAKEN {
        true => ImportedLine { reason: note.map(str::to_owned), ..line },
        false => line,
    }
}

/// A line as this gateway can keep it.
fn judged(line: ImportLine, settings: &ServerSettings, has_program: bool) -> ImportLine {
    if line.verdict != Verdict::Taken {
        return line;
    }
    let verdict = on_gateway(&line.text, settings)
        .or_else(|| of_logins(&line.text, settings, has_program))
        .unwrap_or(Verdict::Taken);
    ImportLine { verdict, ..line }
}

/// The verdict on a directive that the reader takes, where the gateway cannot keep it as it is.
fn on_gateway(text: &str, settings: &ServerSettings) -> Option<Verdict> {
    let nothing = |why: &'static str| Some(Verdict::NoMeaning(Cow::Borrowed(why)));
    let refused = |why: &'static str| Some(Verdict::Refused(Cow::Borrowed(why)));
    match name_of(text) {
        directive @ ("status" | "management") => refused(watching::fault(directive, settings)?),
        "route" | "route-ipv6" => {
            nothing("the files of clients say which networks are behind them (iroute)")
        }
        "tun-mtu" => nothing("Weft tells clients the MTU of its own device"),
        "tls-timeout" => nothing("control packets are sent again as soon as an answer is late"),
        "connect-freq" => nothing("connect-freq-initial limits new clients"),
        "ifconfig-pool" | "ifconfig-ipv6-pool" => {
            nothing("a client without an address of its own gets a free one of the network's range")
        }
        "force-tls-key-material-export" => refused(
            "a client that cannot take keys from the TLS exporter is let in, too: remove the line",
        ),
        "server-ipv6" | "ifconfig-ipv6" if settings.ipv6.or(settings.own_ipv6)?.1 != 64 => {
            refused("an IPv6 range is a /64: correct the prefix length")
        }
        "local" => refused_socket(settings),
        _ => None,
    }
}

/// The same of a directive about logins. A program may stand for those that the configuration names.
fn of_logins(text: &str, settings: &ServerSettings, has_program: bool) -> Option<Verdict> {
    let nothing = |why: &'static str| Some(Verdict::NoMeaning(Cow::Borrowed(why)));
    let refused = |why: &'static str| Some(Verdict::Refused(Cow::Borrowed(why)));
    let name = name_of(text);
    match name {
        "auth-user-pass-verify" | "plugin" if has_program => {
            nothing("the program of --auth-program judges user names and passwords")
        }
        "plugin" => refused(
            "a program asks PAM here: name it by --auth-program; docs/openvpn.md has one for PAM",
        ),
        "auth-user-pass-verify" => {
            let program = settings.login_program.as_ref()?;
            if !program.is_by_file {
                return refused(
                    "the password would be in the program's environment: use via-file, or name a program by --auth-program",
                );
            }
            if program.command.contains(char::is_whitespace) {
                return refused(
                    "the program gets the file as its only argument: name one by --auth-program that runs this command",
                );
            }
            None
        }
        "setenv" | "setenv-safe" if !has_login(settings) => {
            nothing("it is for programs that OpenVPN runs")
        }
        "auth-gen-token"
        | "auth-gen-token-secret"
        | "auth-user-pass-optional"
        | "username-as-common-name"
            if !has_login(settings) =>
        {
            nothing(NO_PASSWORDS)
        }
        "auth-gen-token" if settings.tokens.is_some_and(|tokens| tokens.is_external) => refused(
            "a program is asked for the password alone, tokens are judged here: remove external-auth",
        ),
        "auth-gen-token-secret" => nothing(
            "tokens are signed with a key of this gateway's: users give their passwords once more",
        ),
        "auth-user-pass-optional" => {
            refused("user name and password are always asked for: remove the line")
        }
        "verify-client-cert"
            if settings.client_cert == VerifyClientCert::Optional && !settings.names_by_user =>
        {
            refused(
                "a client would be known by its certificate or by its user name, as it likes: add username-as-common-name, or use none or require",
            )
        }
        _ => None,
    }
}

fn refused_socket(settings: &ServerSettings) -> Option<Verdict> {
    let refused = |why: &'static str| Some(Verdict::Refused(Cow::Borrowed(why)));
    let is_name = |host: &str| host.parse::<IpAddr>().is_err();
    let mut hosts = settings.listens.iter().filter_map(|listen| listen.host.as_deref());
    if hosts.any(is_name) {
        return refused("the socket needs an address, not a name: write the address");
    }
    None
}

fn judged_of_client(line: ImportLine) -> ImportLine {
    if name_of(&line.text) != "ifconfig-ipv6-push" || line.verdict != Verdict::Taken {
        return line;
    }
    let why = "a client's IPv6 address follows from its IPv4 address on a network: remove the line";
    ImportLine { verdict: Verdict::Refused(Cow::Borrowed(why)), ..line }
}

/// The address that a client had by the file of the pool.
pub(super) fn pool_addresses(
    text: &str,
    topology: Topology,
) -> impl Iterator<Item = (String, Ipv4Addr)> {
    let (entries, _) = weft_openvpn::config::read_pool_file(text);
    entries.into_iter().filter_map(move |entry| {
        let address = entry.client_ipv4(topology)?;
        Some((entry.name, address))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn reading(config: &str, clients: &[(&str, &str)]) -> Reading {
        let clients = clients.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        Reading::of(&Saved {
            config: zeroize::Zeroizing::new(config.to_owned()),
            client_files: clients.collect(),
            ..Saved::default()
        })
    }

    /// The verdicts on the lines, with their first words.
    fn verdicts(reading: &Reading) -> Vec<(&str, &str)> {
        reading.lines.iter().map(|line| (name_of(&line.text), line.verdict.as_str())).collect()
    }

    #[test]
    fn lines_that_this_gateway_cannot_keep_are_not_said_to_be_taken() {
        let config = "port 1194\nproto tcp\nstatus a.log\nmanagement localhost 7505\n\
            push \"redirect-gateway def1\"\npush \"route 192.0.2.0 255.255.255.0\"\n\
            auth-user-pass-verify /bin/x via-env\nverify-client-cert none\nlocal vpn.example\n\
            crl-verify gone.pem\npush \"x\n";
        let reading = reading(config, &[]);
        let expected = [
            ("port", "taken"),
            ("proto", "taken"),
            ("status", "taken"),
            ("management", "refused"),
            ("push", "taken"),
            ("push", "taken"),
            ("auth-user-pass-verify", "refused"),
            ("verify-client-cert", "taken"),
            ("local", "refused"),
            ("crl-verify", "refused"),
            ("", "refused"),
        ];
        assert_eq!(verdicts(&reading), expected);
        assert_eq!(reading.in_the_way(false), 5);
        // Passwords, the list, and the line that nobody can read.
        assert_eq!(reading.in_the_way(true), 3);
    }

    #[test]
    fn lines_that_decide_who_is_let_in_are_never_left_out() {
        for line in [
            "config more.conf",
            "verify-hash 00:11",
            "remote-cert-ku 80",
            "x509-username-field ext:subjectAltName",
            "setenv opt tls-verify /bin/x",
            "setenv opt auth-user-pass-verify /bin/x via-env",
        ] {
            let reading = reading(line, &[]);
            assert_eq!(
                (reading.lines[0].verdict.as_str(), reading.in_the_way(true)),
                (REFUSED, 1),
                "{line}"
            );
        }
        let external = "auth-gen-token 0 external-auth\nauth-user-pass-verify /bin/x via-file\n";
        let reading = reading(external, &[]);
        assert_eq!((reading.in_the_way(true), reading.settings.tokens), (0, None));
    }

    #[test]
    fn lines_about_logins_are_taken_as_far_as_they_can_be_kept() {
        const SCRIPT: &str = "auth-user-pass-verify /bin/x via-file\n";
        const PAM: &str = "plugin /lib/openvpn-plugin-auth-pam.so login\n";
        for (config, expected) in [
            (SCRIPT.to_owned(), "taken"),
            ("auth-user-pass-verify \"/bin/x y\" via-file\n".to_owned(), "refused"),
            (PAM.to_owned(), "refused"),
            ("auth-gen-token 60\n".to_owned(), "nothing"),
            (format!("auth-gen-token 60\n{SCRIPT}"), "taken"),
            (format!("auth-gen-token 0 external-auth\n{SCRIPT}"), "refused"),
            (format!("auth-user-pass-optional\n{SCRIPT}"), "refused"),
            ("username-as-common-name\n".to_owned(), "nothing"),
            (format!("username-as-common-name\n{SCRIPT}"), "taken"),
            ("setenv ROOM 7\n".to_owned(), "nothing"),
            (format!("setenv ROOM 7\n{SCRIPT}"), "taken"),
            (format!("verify-client-cert optional\n{SCRIPT}"), "refused"),
            (format!("verify-client-cert optional\nusername-as-common-name\n{SCRIPT}"), "taken"),
        ] {
            let reading = reading(&config, &[]);
            assert_eq!(verdicts(&reading)[0].1, expected, "{config}");
        }
        let saved = Saved {
            config: zeroize::Zeroizing::new(PAM.to_owned()),
            auth_program: Some("/etc/pam".into()),
            ..Saved::default()
        };
        assert_eq!(verdicts(&Reading::of(&saved))[0].1, "nothing");
    }

    #[test]
    fn fixed_addresses_are_of_one_client_each_and_of_the_network() {
        let config = "server 10.8.0.0 255.255.255.0\nclient-config-dir ccd\n";
        let push = |address: &str| format!("ifconfig-push {address} 255.255.255.0\n");
        let files = ["10.8.0.5", "10.8.0.5", "10.9.0.5", "10.8.0.1", "10.8.0.6"].map(push);
        let [anna, berta, carla, default, dora] = files.each_ref().map(String::as_str);
        let clients = [
            ("anna", anna),
            ("berta", berta),
            ("carla", carla),
            ("DEFAULT", default),
            ("dora", dora),
        ];
        let mut reading = reading(config, &clients);
        assert_eq!(reading.range(), Some("10.8.0.0/24".parse().unwrap()));
        reading.check_addresses("10.8.0.0/24".parse().unwrap(), Ipv4Addr::new(10, 8, 0, 1));
        let refused = reading.lines.iter().filter(|line| line.verdict == REFUSED);
        let refused: Vec<&str> = refused.filter_map(|line| line.file.as_deref()).collect();
        assert_eq!(refused, ["ccd/DEFAULT", "ccd/berta", "ccd/carla"]);
        assert_eq!(reading.in_the_way(true), 3);
    }
}
