//! Members of the guard's sets as elements of nftables. Pure: bytes in, bytes out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Member;
use crate::firewall::elements::{Element, Family, Set};
use crate::net::neighbours::MacAddress;

/// From a mark to a number.
const MARKS: Set = inet(super::MAPS[0].0);
/// From an outer address to a number.
const V4: Set = inet(super::MAPS[1].0);
const V6: Set = inet(super::MAPS[2].0);
/// A number, an overlay port and an Ethernet address.
const MACS: Set = Set { family: Family::Bridge, table: super::TABLE, name: super::MACS };

/// The sets of the guard that hold members.
pub(super) const SETS: [Set; 4] = [MARKS, V4, V6, MACS];

const fn inet(name: &'static str) -> Set {
    Set { family: Family::Inet, table: super::TABLE, name }
}

pub(super) const fn set_of(member: &Member) -> Set {
    match member {
        Member::Mark(_) => MARKS,
        Member::Address(IpAddr::V4(_), _) => V4,
        Member::Address(IpAddr::V6(_), _) => V6,
        Member::Mac(..) => MACS,
    }
}

/// The element of a member, in the set of [`set_of`].
pub(super) fn element(member: &Member) -> Element {
    let maps = |key: Vec<u8>, number: u32| Element { key, data: Some(bytes(number)) };
    match member {
        Member::Mark(number) => maps(bytes(*number), *number),
        Member::Address(IpAddr::V4(address), number) => maps(address.octets().into(), *number),
        Member::Address(IpAddr::V6(address), number) => maps(address.octets().into(), *number),
        Member::Mac(number, port, mac) => {
            let key = [&number.to_ne_bytes()[..], port, mac, &[0; 2]].concat();
            Element { key, data: None }
        }
    }
}

/// The member of an element of a set; `None` for one of a form that Weft does not write.
pub(super) fn member(set: Set, element: &Element) -> Option<Member> {
    let Element { key, data } = element;
    let number = |bytes: &[u8]| Some(u32::from_ne_bytes(bytes.try_into().ok()?));
    let data = || number(data.as_deref()?);
    if set == MARKS {
        let mark = number(key)?;
        (data()? == mark).then_some(Member::Mark(mark))
    } else if set == V4 {
        let address = <[u8; 4]>::try_from(key.as_slice()).ok()?;
        Some(Member::Address(Ipv4Addr::from(address).into(), data()?))
    } else if set == V6 {
        let address = <[u8; 16]>::try_from(key.as_slice()).ok()?;
        Some(Member::Address(Ipv6Addr::from(address).into(), data()?))
    } else {
        let (of, rest) = key.split_at_checked(4)?;
        let (port, mac) = rest.split_at_checked(16)?;
        let mac: MacAddress = mac.get(..6)?.try_into().ok()?;
        Some(Member::Mac(number(of)?, port.try_into().ok()?, mac))
    }
}

/// As this machine writes a number: so `nft` speaks, too.
fn bytes(number: u32) -> Vec<u8> {
    number.to_ne_bytes().into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::NUMBERS;
    use super::*;

    #[test]
    fn members_are_those_of_their_elements() {
        for (set, is) in [
            (MARKS, Member::Mark(NUMBERS + 7)),
            (V4, Member::Address("192.0.2.7".parse().unwrap(), NUMBERS + 1)),
            (V6, Member::Address("fd77::7".parse().unwrap(), NUMBERS + 2)),
            (MACS, Member::Mac(NUMBERS + 3, *b"weft-vx4-0a1b2c\0", [2, 1, 2, 3, 4, 5])),
        ] {
            assert_eq!(set_of(&is), set);
            let mut element = element(&is);
            assert_eq!(element.key.len() % 4, 0);
            assert_eq!(member(set, &element), Some(is));
            element.key.truncate(3);
            assert_eq!(member(set, &element), None);
        }
        let strange = Element { key: vec![1, 0, 0, 0x58], data: Some(vec![2, 0, 0, 0x58]) };
        assert_eq!(member(MARKS, &strange), None);
    }
}
