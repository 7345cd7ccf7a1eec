//! The file of one client in `client-config-dir`.

use std::borrow::Cow;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::lexer::{self, Directive};
use super::pushed::pushed_line;
use super::{Args, Files, ImportLine, Outcome, TAKEN, Verdict};

/// Most networks behind one client, and most changes of its pushes.
const ITEMS_MAX: usize = 4_096;
/// Most lines, over all files.
const LINES_MAX: usize = 16_384;
/// How deep files may name each other by `config`.
const DEPTH_MAX: usize = 10;

/// Why a network of all addresses is refused.
const ALL_BEHIND: &str =
    "this host would reach all else through that client: name the networks behind the client";

/// A change of the options that all clients are pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PushChange {
    /// One more.
    Add(String),
    /// Those that begin like this go.
    Remove(String),
    /// All go.
    Reset,
}

/// What the file of one client says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientFile {
    /// The address, and the mask or (under net30 and p2p) the other end.
    pub ipv4: Option<(Ipv4Addr, Ipv4Addr)>,
    /// The address, the prefix length, the other end.
    pub ipv6: Option<(Ipv6Addr, u8, Option<Ipv6Addr>)>,
    /// Networks behind the client: address and prefix length.
    pub networks_ipv4: Vec<(Ipv4Addr, u8)>,
    /// Networks behind the client: address and prefix length.
    pub networks_ipv6: Vec<(Ipv6Addr, u8)>,
    /// Changes of the pushed options, in their order.
    pub pushes: Vec<PushChange>,
    /// The client is not let in.
    pub is_disabled: bool,
}

impl ClientFile {
    /// The options that this client is pushed, from those that all are.
    pub fn apply_pushes(&self, common: &[String]) -> Vec<String> {
        let mut options = common.to_vec();
        for change in &self.pushes {
            match change {
                PushChange::Add(option) => options.push(option.clone()),
                PushChange::Remove(start) => options.retain(|option| !option.starts_with(start)),
                PushChange::Reset => options.clear(),
            }
        }
        options
    }

    /// Why its address cannot be given from a network; `None`: it can.
    pub fn address_fault(&self, network: Ipv4Addr, prefix: u8, server: Ipv4Addr) -> Option<String> {
        let (address, _) = self.ipv4?;
        let mask = mask_of(prefix);
        let (bits, base) = (u32::from(address), u32::from(network) & mask);
        if bits & mask != base {
            return Some(format!(
                "{address} is not in {network}/{prefix}: give one of that network"
            ));
        }
        let is_edge = prefix < 31 && (bits == base || bits == base | !mask);
        if is_edge || address == server {
            return Some(format!(
                "{address} is no client's address in {network}/{prefix}: give another"
            ));
        }
        None
    }

    fn apply(&mut self, args: Args<'_>) -> Outcome {
        let full = || Err(format!("more than {ITEMS_MAX} lines of this kind: remove some"));
        match args.0.name.as_str() {
            "ifconfig-push" => {
                let expected = "the client's address, and a mask or the other end's address";
                self.ipv4 = Some((args.get(0, expected)?, args.get(1, expected)?));
            }
            "ifconfig-ipv6-push" => {
                let (address, bits) = prefix(args)?;
                self.ipv6 = Some((address, bits, args.optional(1, "an IPv6 address")?));
            }
            "iroute" => {
                let (expected, all) = ("a network and a mask", Ipv4Addr::BROADCAST);
                let mask: Ipv4Addr = args.optional(1, expected)?.unwrap_or(all);
                let bits = u32::from(mask).leading_ones();
                if mask_of(bits as u8) != u32::from(mask) {
                    return Err(args.bad(1, "a mask such as 255.255.255.0"));
                }
                if self.networks_ipv4.len() == ITEMS_MAX {
                    return full();
                }
                if bits == 0 {
                    return Err(ALL_BEHIND.to_owned());
                }
                self.networks_ipv4.push((args.get(0, expected)?, bits as u8));
            }
            "iroute-ipv6" if self.networks_ipv6.len() == ITEMS_MAX => return full(),
            "iroute-ipv6" => match prefix(args)? {
                (_, 0) => return Err(ALL_BEHIND.to_owned()),
                network => self.networks_ipv6.push(network),
            },
            "push" | "push-remove" | "push-reset" if self.pushes.len() == ITEMS_MAX => {
                return full();
            }
            "push" => {
                return pushed_line(args, &mut |option| {
                    self.pushes.push(PushChange::Add(option));
                    TAKEN
                });
            }
            "push-remove" => {
                let start = args.text(0, "the beginning of an option")?.to_owned();
                self.pushes.push(PushChange::Remove(start));
            }
            "push-reset" => self.pushes.push(PushChange::Reset),
            "disable" => self.is_disabled = true,
            "vlan-pvid" => return Err("VLANs exist with dev tap only: remove it".to_owned()),
            "comp-lzo" | "compress" => return super::nothing("Weft never compresses"),
            name => {
                return Err(format!("{name} has no place in the file of one client: remove it"));
            }
        }
        TAKEN
    }
}

/// Reads the file of one client. Returns what it says, and what became of each line.
pub fn read_client_file(text: &str, files: &mut dyn Files) -> (ClientFile, Vec<ImportLine>) {
    let (mut file, mut lines) = (ClientFile::default(), Vec::new());
    read(text, None, 0, files, &mut file, &mut lines);
    (file, lines)
}

fn read(
    text: &str,
    name: Option<&str>,
    depth: usize,
    files: &mut dyn Files,
    file: &mut ClientFile,
    lines: &mut Vec<ImportLine>,
) {
    for read_line in lexer::read(text) {
        // Files that name each other could go on for a long time.
        if lines.len() >= LINES_MAX {
            return;
        }
        let (line, shown, outcome) = match &read_line {
            Ok(directive) if directive.name == "config" => {
                (directive.line, directive.shown(), include(directive, depth, files, file, lines))
            }
            Ok(directive) => (directive.line, directive.shown(), file.apply(Args(directive))),
            Err(bad) => (bad.line, String::new(), Err(bad.error.to_string())),
        };
        let verdict = outcome.unwrap_or_else(|why| Verdict::Refused(Cow::Owned(why)));
        lines.push(ImportLine { file: name.map(str::to_owned), line, text: shown, verdict });
    }
}

fn include(
    directive: &Directive,
    depth: usize,
    files: &mut dyn Files,
    file: &mut ClientFile,
    lines: &mut Vec<ImportLine>,
) -> Outcome {
    if depth + 1 >= DEPTH_MAX {
        return Err(format!("files name each other more than {DEPTH_MAX} deep: join them"));
    }
    let text = Args(directive).content(files)?;
    let name = directive.values.first().map(String::as_str);
    read(&text, name, depth + 1, files, file, lines);
    TAKEN
}

fn prefix(args: Args<'_>) -> Result<(Ipv6Addr, u8), String> {
    let expected = "an IPv6 address with its prefix length";
    let bad = || args.bad(0, expected);
    let (address, bits) = args.text(0, expected)?.split_once('/').ok_or_else(bad)?;
    let bits = bits.parse().ok().filter(|bits| *bits <= 128).ok_or_else(bad)?;
    Ok((address.parse().map_err(|_| bad())?, bits))
}

fn mask_of(bits: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(bits.min(32))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn no_files() -> impl FnMut(&str) -> Result<String, String> {
        |path| match path {
            "more" => Ok("iroute-ipv6 fd01::/48\nconfig more\n".to_owned()),
            _ => Err("no such file".to_owned()),
        }
    }

    #[test]
    fn the_file_of_a_client_is_read() {
        let text = "ifconfig-push 10.8.0.50 255.255.255.0\nifconfig-ipv6-push fd00::50/64 fd00::1\n\
            iroute 192.168.7.0 255.255.255.0\niroute 192.168.8.1\npush \"route 10.1.0.0 255.255.0.0\"\n\
            push-remove route-ipv6\nconfig more\ndisable\n";
        let (file, lines) = read_client_file(text, &mut no_files());
        let address = |text: &str| text.parse::<Ipv4Addr>().unwrap();
        assert_eq!(file.ipv4, Some((address("10.8.0.50"), address("255.255.255.0"))));
        assert_eq!(file.ipv6.unwrap().1, 64);
        assert_eq!(
            file.networks_ipv4,
            [(address("192.168.7.0"), 24), (address("192.168.8.1"), 32)]
        );
        assert_eq!(file.networks_ipv6.len(), DEPTH_MAX - 1, "a file that names itself ends");
        assert!(file.is_disabled);
        let refused =
            lines.iter().filter(|line| matches!(line.verdict, Verdict::Refused(_))).count();
        assert_eq!(refused, 1);
        let common = ["ping 10".to_owned(), "route-ipv6 fd02::/48".to_owned()];
        assert_eq!(file.apply_pushes(&common), ["ping 10", "route 10.1.0.0 255.255.0.0"]);
        let own = "push \"compress lz4\"\npush \"topology net30\"\npush \"cipher NONE\"\n";
        let (file, lines) = read_client_file(own, &mut no_files());
        assert_eq!(file, ClientFile::default(), "Weft pushes its own");
        assert!(lines.iter().all(|line| matches!(line.verdict, Verdict::NoMeaning(_))));
        let (file, _) = read_client_file("push-reset\npush \"ping 5\"", &mut no_files());
        assert_eq!(file.apply_pushes(&common), ["ping 5"]);
    }

    #[test]
    fn faults_have_a_line_and_a_reason() {
        let text = "ifconfig-push 10.8.0.50\niroute 10.0.0.0 255.0.255.0\nport 5\npush \"x\n\
            iroute-ipv6 fd00::\nconfig gone\npush \"dhcp-option DOMAIN-SEARCH a,b\"\n\
            iroute 0.0.0.0 0.0.0.0\niroute-ipv6 ::/0\n";
        let (file, lines) = read_client_file(text, &mut no_files());
        assert_eq!(file, ClientFile::default());
        let reasons: Vec<String> = lines
            .iter()
            .map(|line| match &line.verdict {
                Verdict::Refused(why) => format!("{} {why}", line.line),
                other => panic!("{other:?}"),
            })
            .collect();
        for (reason, part) in reasons.iter().zip([
            "1 ifconfig-push has a value too few",
            "2 iroute has a bad value \"255.0.255.0\"",
            "3 port has no place",
            "4 a \" has no second one",
            "5 iroute-ipv6 has a bad value",
            "6 gone cannot be read (no such file)",
            "7 the option has a comma",
            "8 this host would reach all else",
            "9 this host would reach all else",
        ]) {
            assert!(reason.starts_with(part), "{reason}");
        }
        assert_eq!(reasons.len(), 9);
    }

    #[test]
    fn an_address_outside_of_the_network_is_named() {
        let network = Ipv4Addr::new(10, 8, 0, 0);
        let server = Ipv4Addr::new(10, 8, 0, 1);
        let fault = |last: [u8; 4]| {
            let ipv4 = Some((Ipv4Addr::from(last), Ipv4Addr::new(255, 255, 255, 0)));
            ClientFile { ipv4, ..ClientFile::default() }.address_fault(network, 24, server)
        };
        assert_eq!(fault([10, 8, 0, 50]), None);
        assert!(fault([10, 9, 0, 50]).unwrap().contains("not in 10.8.0.0/24"));
        for last in [0, 1, 255] {
            assert!(fault([10, 8, 0, last]).is_some());
        }
        assert_eq!(ClientFile::default().address_fault(network, 24, server), None);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(
            name in prop::sample::select(vec!["iroute", "iroute-ipv6", "ifconfig-push", "push", "config", ""]),
            text in "[ -~\n]{0,80}",
        ) {
            let (file, _) = read_client_file(&format!("{name} {text}"), &mut no_files());
            let _ = file.address_fault(Ipv4Addr::UNSPECIFIED, 0, Ipv4Addr::UNSPECIFIED);
        }
    }
}
