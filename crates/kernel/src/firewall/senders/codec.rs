//! Members of sets and maps of nftables (`linux/netfilter/nf_tables.h`). Pure: bytes in, bytes out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Member;
use crate::{
    net::neighbours::MacAddress,
    netlink::{
        reader::{Message, attribute, attributes},
        writer::{Answer, NESTED, Writer},
    },
};

/// The subsystem number of nftables in a message's type (NFNL_SUBSYS_NFTABLES).
const SUBSYSTEM: u16 = 10;
const NEWSETELEM: u16 = SUBSYSTEM << 8 | 12;
const GETSETELEM: u16 = SUBSYSTEM << 8 | 13;
const DELSETELEM: u16 = SUBSYSTEM << 8 | 14;
/// The message types that begin and end a transaction (NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END).
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// Length of `struct nfgenmsg`.
const FAMILY_HEADER_LEN: usize = 4;

const LIST_TABLE: u16 = 1;
const LIST_SET: u16 = 2;
const LIST_ELEMENTS: u16 = 3;
const ELEMENT: u16 = 1;
const ELEMENT_KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const VALUE: u16 = 1;

const NFPROTO_INET: u8 = 1;
const NFPROTO_BRIDGE: u8 = 7;

/// Most members in one message: their attributes (28 to 56 bytes each) must fit a length of 16 bits.
pub(super) const MEMBERS_MAX: usize = 500;

/// The sets of the guard that hold members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Set {
    /// From a mark to a number.
    Marks,
    /// From an outer address to a number.
    V4,
    V6,
    /// A number, an overlay port and an Ethernet address.
    Macs,
}

impl Set {
    pub(super) const ALL: [Self; 4] = [Self::Marks, Self::V4, Self::V6, Self::Macs];

    const fn place(self) -> (u8, &'static str) {
        let [marks, v4, v6] = super::MAPS;
        match self {
            Self::Marks => (NFPROTO_INET, marks.0),
            Self::V4 => (NFPROTO_INET, v4.0),
            Self::V6 => (NFPROTO_INET, v6.0),
            Self::Macs => (NFPROTO_BRIDGE, super::MACS),
        }
    }

    pub(super) const fn of(member: &Member) -> Self {
        match member {
            Member::Mark(_) => Self::Marks,
            Member::Address(IpAddr::V4(_), _) => Self::V4,
            Member::Address(IpAddr::V6(_), _) => Self::V6,
            Member::Mac(..) => Self::Macs,
        }
    }
}

/// One step of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step<'a> {
    Empty(Set),
    Remove(Set, &'a [Member]),
    Add(Set, &'a [Member]),
}

/// The messages of a whole transaction.
pub(super) fn transaction(steps: &[Step<'_>]) -> Vec<Writer> {
    let step = |step: &Step<'_>| {
        let (kind, set, members) = match *step {
            Step::Empty(set) => (DELSETELEM, set, &[][..]),
            Step::Remove(set, members) => (DELSETELEM, set, members),
            Step::Add(set, members) => (NEWSETELEM, set, members),
        };
        let mut message = request(kind, set, Answer::Acknowledgement);
        if !members.is_empty() {
            message.nest(LIST_ELEMENTS | NESTED, |list| {
                members.iter().for_each(|member| element(list, member));
            });
        }
        message
    };
    let mut messages = vec![edge(BATCH_BEGIN)];
    messages.extend(steps.iter().map(step));
    messages.push(edge(BATCH_END));
    messages
}

/// Asks for all members of a set.
pub(super) fn listing(set: Set) -> Writer {
    request(GETSETELEM, set, Answer::Dump)
}

/// The members in one message of a listing. Yields `None` for a member of a form that Weft does not write.
pub(super) fn members(set: Set, message: &Message<'_>) -> impl Iterator<Item = Option<Member>> {
    let body = message.body.get(FAMILY_HEADER_LEN..).unwrap_or_default();
    let list = attribute(body, LIST_ELEMENTS).unwrap_or_default();
    attributes(list).filter(|(kind, _)| *kind == ELEMENT).map(move |(_, element)| {
        let value = |kind| attribute(attribute(element, kind)?, VALUE);
        let key = value(ELEMENT_KEY)?;
        let number = |bytes: &[u8]| Some(u32::from_ne_bytes(bytes.try_into().ok()?));
        let data = || number(value(ELEMENT_DATA)?);
        Some(match set {
            Set::Marks => {
                let mark = number(key)?;
                (data()? == mark).then_some(Member::Mark(mark))?
            }
            Set::V4 => {
                Member::Address(Ipv4Addr::from(<[u8; 4]>::try_from(key).ok()?).into(), data()?)
            }
            Set::V6 => {
                Member::Address(Ipv6Addr::from(<[u8; 16]>::try_from(key).ok()?).into(), data()?)
            }
            Set::Macs => {
                let (of, rest) = key.split_at_checked(4)?;
                let (port, mac) = rest.split_at_checked(16)?;
                let mac: MacAddress = mac.get(..6)?.try_into().ok()?;
                Member::Mac(number(of)?, port.try_into().ok()?, mac)
            }
        })
    })
}

/// The first or the last message.
fn edge(kind: u16) -> Writer {
    let mut message = Writer::request(kind, Answer::Nothing);
    let [high, low] = SUBSYSTEM.to_be_bytes();
    message.raw(&[0, 0, high, low]);
    message
}

fn request(kind: u16, set: Set, answer: Answer) -> Writer {
    let (family, name) = set.place();
    let mut message = Writer::request(kind, answer);
    message.raw(&[family, 0, 0, 0]);
    message.text(LIST_TABLE, super::TABLE);
    message.text(LIST_SET, name);
    message
}

fn element(list: &mut Writer, member: &Member) {
    let value = |writer: &mut Writer, kind: u16, bytes: &[u8]| {
        writer.nest(kind | NESTED, |it| it.bytes(VALUE, bytes));
    };
    list.nest(ELEMENT | NESTED, |it| match member {
        Member::Mark(number) => {
            value(it, ELEMENT_KEY, &number.to_ne_bytes());
            value(it, ELEMENT_DATA, &number.to_ne_bytes());
        }
        Member::Address(address, number) => {
            match address {
                IpAddr::V4(address) => value(it, ELEMENT_KEY, &address.octets()),
                IpAddr::V6(address) => value(it, ELEMENT_KEY, &address.octets()),
            }
            value(it, ELEMENT_DATA, &number.to_ne_bytes());
        }
        // Each part of a key fills whole words.
        Member::Mac(number, port, mac) => {
            value(it, ELEMENT_KEY, &[&number.to_ne_bytes()[..], port, mac, &[0; 2]].concat());
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::NUMBERS;
    use super::*;
    use crate::netlink::reader::messages;

    /// `nft` speaks so, too: the first word of the key is a number as this machine writes it.
    #[test]
    fn elements_read_back_as_written() {
        let all = [
            (Set::Marks, Member::Mark(NUMBERS + 7)),
            (Set::V4, Member::Address("192.0.2.7".parse().unwrap(), NUMBERS + 1)),
            (Set::V6, Member::Address("fd77::7".parse().unwrap(), NUMBERS + 2)),
            (Set::Macs, Member::Mac(NUMBERS + 3, *b"weft-vx4-0a1b2c\0", [2, 1, 2, 3, 4, 5])),
        ];
        for (set, member) in all {
            assert_eq!(Set::of(&member), set);
            let mut found = transaction(&[Step::Empty(set), Step::Add(set, &[member])]);
            assert_eq!(found.len(), 4);
            let bytes: Vec<u8> =
                found.iter_mut().flat_map(|message| message.finish(1, 0).to_vec()).collect();
            let found: Vec<_> = messages(&bytes).collect();
            assert_eq!(found.len(), 4);
            assert_eq!(found[0].body, [0, 0, 0, 10]);
            assert_eq!(found[2].kind, NEWSETELEM);
            assert_eq!(members(set, &found[2]).collect::<Vec<_>>(), [Some(member)]);
            let cut = Message { body: &found[2].body[..found[2].body.len() - 4], ..found[2] };
            assert_eq!(members(set, &cut).flatten().count(), 0);
        }
    }

    #[test]
    fn a_message_holds_so_many_members() {
        let address = Member::Address(IpAddr::V6(Ipv6Addr::LOCALHOST), NUMBERS);
        let mac = Member::Mac(NUMBERS, [0; 16], [0; 6]);
        for member in [address, mac] {
            let many = vec![member; MEMBERS_MAX];
            let length = transaction(&[Step::Add(Set::of(&member), &many)])[1].len();
            assert!(length < usize::from(u16::MAX), "{length}");
        }
    }
}
