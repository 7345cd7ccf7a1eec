//! Elements of nftables' sets and maps, written and read by netlink (`linux/netfilter/nf_tables.h`). The program
//! `nft` may take seconds, and some elements change with every container.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{
        error::RequestError,
        exchange::Exchange,
        reader::{Message, attribute, attributes},
        socket::RECEIVE_BUFFER_BYTES,
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

/// Most elements in one message: their attributes (28 to 60 bytes each) must fit a length of 16 bits.
pub(super) const ELEMENTS_MAX: usize = 500;

/// The name of a device, as the kernel keeps it.
pub(super) type DeviceName = [u8; 16];

/// A device's name as the kernel keeps it; of a longer text its beginning.
pub(super) fn device_name(text: &str) -> DeviceName {
    let mut name = [0; 16];
    name.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
    name
}

/// The address family of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Family {
    /// NFPROTO_INET.
    Inet = 1,
    /// NFPROTO_BRIDGE.
    Bridge = 7,
}

/// A set or map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Set {
    pub(super) family: Family,
    pub(super) table: &'static str,
    pub(super) name: &'static str,
}

/// An element: the bytes of its key, and in a map those of its value. Each part of a key fills whole words of four
/// bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Element {
    pub(super) key: Vec<u8>,
    pub(super) data: Option<Vec<u8>>,
}

/// One step of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Empty(Set),
    Remove(Set, Vec<Element>),
    Add(Set, Vec<Element>),
}

/// A socket that writes and reads elements. After an error it is of no further use.
pub(super) struct Elements {
    exchange: Exchange,
}

/// Recognizes the kernel's notices of changes that a socket of ours made.
#[derive(Debug, Clone, Default)]
pub(crate) struct OwnChanges(Arc<AtomicU32>);

impl OwnChanges {
    /// Whether the socket of this port made a change. Port 0 is the kernel's.
    pub(crate) fn made(&self, port: u32) -> bool {
        port != 0 && port == self.0.load(Ordering::Relaxed)
    }
}

impl Elements {
    /// Opens a socket in the kernel's namespace, whose changes `own` recognizes from now on.
    pub(super) fn open(kernel: &Kernel, own: &OwnChanges) -> Result<Self, KernelError> {
        let failed =
            |source: io::Error| KernelError::Socket { doing: "open nftables".into(), source };
        let open = || Exchange::open(NETLINK_NETFILTER, RECEIVE_BUFFER_BYTES).map_err(failed);
        let exchange = kernel.at_home(open)?;
        own.0.store(exchange.port().map_err(failed)?, Ordering::Relaxed);
        Ok(Self { exchange })
    }

    /// Carries out all steps or none.
    pub(super) async fn change(&mut self, steps: &[Step]) -> Result<(), RequestError> {
        self.exchange.transaction(&mut transaction(steps)).await
    }

    /// All elements of a set; `None` for one without a key.
    pub(super) async fn list(&mut self, set: Set) -> Result<Vec<Option<Element>>, RequestError> {
        let read = |message: &Message<'_>| elements(message).collect::<Vec<_>>();
        self.exchange.dump(request(GETSETELEM, set, Answer::Dump), read).await
    }
}

/// The messages of a whole transaction.
fn transaction(steps: &[Step]) -> Vec<Writer> {
    let step = |step: &Step| {
        let (kind, set, elements) = match step {
            Step::Empty(set) => (DELSETELEM, *set, &[][..]),
            Step::Remove(set, elements) => (DELSETELEM, *set, elements.as_slice()),
            Step::Add(set, elements) => (NEWSETELEM, *set, elements.as_slice()),
        };
        let mut message = request(kind, set, Answer::Acknowledgement);
        if !elements.is_empty() {
            message.nest(LIST_ELEMENTS | NESTED, |list| {
                elements.iter().for_each(|it| write(list, it));
            });
        }
        message
    };
    let mut messages = vec![edge(BATCH_BEGIN)];
    messages.extend(steps.iter().map(step));
    messages.push(edge(BATCH_END));
    messages
}

/// The elements in one message of a listing.
fn elements(message: &Message<'_>) -> impl Iterator<Item = Option<Element>> {
    let body = message.body.get(FAMILY_HEADER_LEN..).unwrap_or_default();
    let list = attribute(body, LIST_ELEMENTS).unwrap_or_default();
    attributes(list).filter(|(kind, _)| *kind == ELEMENT).map(|(_, element)| {
        let value = |kind| attribute(attribute(element, kind)?, VALUE).map(<[u8]>::to_vec);
        Some(Element { key: value(ELEMENT_KEY)?, data: value(ELEMENT_DATA) })
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
    let mut message = Writer::request(kind, answer);
    message.raw(&[set.family as u8, 0, 0, 0]);
    message.text(LIST_TABLE, set.table);
    message.text(LIST_SET, set.name);
    message
}

fn write(list: &mut Writer, element: &Element) {
    let value = |writer: &mut Writer, kind: u16, bytes: &[u8]| {
        writer.nest(kind | NESTED, |it| it.bytes(VALUE, bytes));
    };
    list.nest(ELEMENT | NESTED, |it| {
        value(it, ELEMENT_KEY, &element.key);
        if let Some(data) = &element.data {
            value(it, ELEMENT_DATA, data);
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::netlink::reader::messages;

    const SET: Set = Set { family: Family::Bridge, table: "weft-guard", name: "senders" };

    #[test]
    fn elements_read_back_as_written() {
        for data in [None, Some(vec![7; 4])] {
            let element = Element { key: (0..28).collect(), data };
            let steps = [Step::Empty(SET), Step::Add(SET, vec![element.clone()])];
            let mut found = transaction(&steps);
            assert_eq!(found.len(), 4);
            let bytes: Vec<u8> =
                found.iter_mut().flat_map(|message| message.finish(1, 0).to_vec()).collect();
            let found: Vec<_> = messages(&bytes).collect();
            assert_eq!(found.len(), 4);
            assert_eq!(found[0].body, [0, 0, 0, 10]);
            assert_eq!(found[2].kind, NEWSETELEM);
            assert_eq!(elements(&found[2]).collect::<Vec<_>>(), [Some(element)]);
            let cut = Message { body: &found[2].body[..found[2].body.len() - 4], ..found[2] };
            assert_eq!(elements(&cut).flatten().count(), 0);
        }
    }

    #[test]
    fn a_message_holds_so_many_elements() {
        for (key, data) in [(vec![0; 32], None), (vec![0; 16], Some(vec![0; 4]))] {
            let many = vec![Element { key, data }; ELEMENTS_MAX];
            let length = transaction(&[Step::Add(SET, many)])[1].len();
            assert!(length < usize::from(u16::MAX), "{length}");
        }
    }

    #[test]
    fn changes_of_the_kernel_are_nobodys_own() {
        let own = OwnChanges::default();
        assert!(!own.made(0));
        own.0.store(7, Ordering::Relaxed);
        assert!(own.made(7) && !own.made(8) && !own.made(0));
    }
}
