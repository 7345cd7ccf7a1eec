//! Notices of changes to nftables tables by any program.

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{elements::OwnChanges, nft::Table};
use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{
        notices::{Notices, is_overrun},
        reader::{Message, attribute},
        socket::Datagram,
    },
};

/// The multicast group of nftables' messages (NFNLGRP_NFTABLES).
const GROUP_NFTABLES: u32 = 7;
/// The subsystem number of nftables in a message's type (NFNL_SUBSYS_NFTABLES).
const SUBSYSTEM_NFTABLES: u16 = 10;
/// The end of a transaction (NFT_MSG_NEWGEN); its first attribute is not a table.
const MESSAGE_NEWGEN: u16 = 15;
/// Receive buffer, in bytes. When it runs over, something changed.
const RECEIVE_BUFFER_BYTES: usize = 1 << 18;
/// Length of `struct nfgenmsg`, whose first byte is the address family.
const FAMILY_HEADER_LEN: usize = 4;
/// Our own tables' names begin so.
const OWN_TABLES: &str = "weft-";
/// The attribute with the table's name, in every message about a table or its contents.
const ATTRIBUTE_TABLE: u16 = 1;

/// Reports that a program, Weft included, changed one of some tables.
pub struct NftWatch {
    notices: Notices,
    /// `None`: all that are not ours.
    tables: Option<Vec<Table>>,
    /// Changes that these make are none.
    except: Option<OwnChanges>,
}

impl Kernel {
    /// Watches all tables but those of Weft.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch_foreign_rules(&self) -> Result<NftWatch, KernelError> {
        self.watch_tables(None, None)
    }

    pub(crate) fn nft_watch(
        &self,
        tables: Vec<Table>,
        except: Option<OwnChanges>,
    ) -> Result<NftWatch, KernelError> {
        self.watch_tables(Some(tables), except)
    }

    fn watch_tables(
        &self,
        tables: Option<Vec<Table>>,
        except: Option<OwnChanges>,
    ) -> Result<NftWatch, KernelError> {
        let open = || {
            let notices = Notices::open(NETLINK_NETFILTER, 0, RECEIVE_BUFFER_BYTES);
            let joined = notices.and_then(|it| it.join(GROUP_NFTABLES).map(|()| it));
            joined.map_err(|source| KernelError::Socket { doing: "watch nftables".into(), source })
        };
        Ok(NftWatch { notices: self.at_home(open)?, tables, except })
    }
}

impl NftWatch {
    /// Waits until one of the tables was changed. Several changes may be reported as one. Dropping the future
    /// loses no notice that was not yet received.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the socket fails; the watch should be opened again then.
    pub async fn changed(&mut self) -> Result<(), KernelError> {
        loop {
            let Self { notices, tables, except } = self;
            match notices.receive().await {
                Ok(datagram) if is_about(&datagram, tables.as_deref(), except.as_ref()) => {
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if is_overrun(&error) => return Ok(()),
                Err(source) => {
                    return Err(KernelError::Socket { doing: "watch nftables".into(), source });
                }
            }
        }
    }
}

fn is_about(
    datagram: &Datagram<'_>,
    tables: Option<&[Table]>,
    except: Option<&OwnChanges>,
) -> bool {
    let is_except = |message: &Message<'_>| except.is_some_and(|it| it.made(message.port));
    datagram.messages().filter(|message| !is_except(message)).any(|message| {
        table_of(&message).is_some_and(|(family, name)| match tables {
            Some(tables) => tables
                .iter()
                .any(|table| number_of(table.family) == family && table.name.as_bytes() == name),
            None => !name.starts_with(OWN_TABLES.as_bytes()),
        })
    })
}

/// Family and name of the table that a message is about.
fn table_of<'a>(message: &Message<'a>) -> Option<(u8, &'a [u8])> {
    if message.kind >> 8 != SUBSYSTEM_NFTABLES || message.kind & 0xff == MESSAGE_NEWGEN {
        return None;
    }
    let family = *message.body.first()?;
    let name = attribute(message.body.get(FAMILY_HEADER_LEN..)?, ATTRIBUTE_TABLE)?;
    Some((family, name.strip_suffix(&[0]).unwrap_or(name)))
}

/// The number of an address family in nftables (NFPROTO_*).
fn number_of(family: &str) -> u8 {
    match family {
        "inet" => 1,
        "ip" => 2,
        "bridge" => 7,
        "ip6" => 10,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::netlink::{
        reader::messages,
        writer::{Answer, Writer},
    };

    fn message(kind: u16, family: u8, name: &str) -> Vec<u8> {
        let mut message = Writer::request(SUBSYSTEM_NFTABLES << 8 | kind, Answer::Nothing);
        message.raw(&[family, 0, 0, 0]);
        message.text(ATTRIBUTE_TABLE, name);
        message.finish(0, 0).to_vec()
    }

    #[test]
    fn the_table_is_read_and_senseless_messages_are_none() {
        let table = |bytes: &[u8]| {
            let table = messages(bytes).find_map(|message| table_of(&message));
            table.map(|(family, name)| (family, name.to_vec()))
        };
        let whole = message(0, 1, "weft-guard");
        assert_eq!(table(&whole).unwrap(), (1, b"weft-guard".to_vec()));
        assert!(table(&message(MESSAGE_NEWGEN, 0, "weft-guard")).is_none());
        for length in 16..24_u32 {
            let mut cut = whole[..length as usize].to_vec();
            cut[..4].copy_from_slice(&length.to_ne_bytes());
            assert!(table(&cut).is_none(), "{length}");
        }
    }
}
