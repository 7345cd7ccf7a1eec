//! Notices of changes to nftables tables by any program.

use std::io;

use netlink_packet_core::NlasIterator;
use netlink_sys::{
    AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_NETFILTER,
};
use rustix::io::Errno;
use weft_io::namespace;

use super::{nft::Table, senders::Senders};
use crate::{error::KernelError, handle::Kernel, netlink::socket::messages};

/// The multicast group of nftables' messages (NFNLGRP_NFTABLES).
const GROUP_NFTABLES: u32 = 7;
/// The subsystem number of nftables in a message's type (NFNL_SUBSYS_NFTABLES).
const SUBSYSTEM_NFTABLES: u16 = 10;
/// The end of a transaction (NFT_MSG_NEWGEN); its first attribute is not a table.
const MESSAGE_NEWGEN: u16 = 15;
/// Receive buffer, in bytes. When it runs over, something changed.
const RECEIVE_BUFFER_BYTES: usize = 1 << 18;
/// Length of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;
/// Length of `struct nfgenmsg`, whose first byte is the address family.
const FAMILY_HEADER_LEN: usize = 4;
/// Our own tables' names begin so.
const OWN_TABLES: &str = "weft-";
/// The attribute with the table's name, in every message about a table or its contents.
const ATTRIBUTE_TABLE: u16 = 1;

/// Reports that a program, Weft included, changed one of some tables.
pub struct NftWatch {
    socket: TokioSocket,
    /// `None`: all that are not ours.
    tables: Option<Vec<Table>>,
    /// Changes that these make are none.
    except: Option<Senders>,
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
        except: Option<Senders>,
    ) -> Result<NftWatch, KernelError> {
        self.watch_tables(Some(tables), except)
    }

    fn watch_tables(
        &self,
        tables: Option<Vec<Table>>,
        except: Option<Senders>,
    ) -> Result<NftWatch, KernelError> {
        let failed = |source| KernelError::Socket { doing: "watch nftables".into(), source };
        let open = || -> io::Result<TokioSocket> {
            let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
            socket.socket_ref().set_rx_buf_sz(RECEIVE_BUFFER_BYTES as i32)?;
            socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
            socket.socket_mut().add_membership(GROUP_NFTABLES)?;
            Ok(socket)
        };
        let runtime = tokio::runtime::Handle::current();
        let socket = namespace::run_in(&self.inner.home, || {
            let _guard = runtime.enter();
            open()
        });
        Ok(NftWatch { socket: socket.map_err(failed)?.map_err(failed)?, tables, except })
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
            match self.socket.recv_from_full().await {
                Ok((datagram, _)) if self.is_about_ours(&datagram) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                    return Ok(());
                }
                Err(source) => {
                    return Err(KernelError::Socket { doing: "watch nftables".into(), source });
                }
            }
        }
    }

    fn is_about_ours(&self, datagram: &[u8]) -> bool {
        let is_except = |message: &&[u8]| {
            self.except.as_ref().is_some_and(|it| sender_of(message).is_some_and(|by| it.made(by)))
        };
        messages(datagram).filter(|message| !is_except(message)).any(|message| {
            table_of(message).is_some_and(|(family, name)| match &self.tables {
                Some(tables) => tables.iter().any(|table| {
                    number_of(table.family) == family && table.name.as_bytes() == name
                }),
                None => !name.starts_with(OWN_TABLES.as_bytes()),
            })
        })
    }
}

/// Family and name of the table that a message is about.
fn table_of(message: &[u8]) -> Option<(u8, Vec<u8>)> {
    let kind = u16::from_ne_bytes(message.get(4..6)?.try_into().ok()?);
    if kind >> 8 != SUBSYSTEM_NFTABLES || kind & 0xff == MESSAGE_NEWGEN {
        return None;
    }
    let family = *message.get(HEADER_LEN)?;
    let attributes = message.get(HEADER_LEN + FAMILY_HEADER_LEN..)?;
    let name = NlasIterator::new(attributes)
        .filter_map(Result::ok)
        .find(|attribute| attribute.kind() == ATTRIBUTE_TABLE)?
        .value()
        .to_vec();
    Some((family, name.strip_suffix(&[0]).map(<[u8]>::to_vec).unwrap_or(name)))
}

/// The port number of the socket that made the change.
fn sender_of(message: &[u8]) -> Option<u32> {
    message.get(12..16)?.try_into().ok().map(u32::from_ne_bytes)
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

    fn message(kind: u16, family: u8, name: &[u8]) -> Vec<u8> {
        let mut attribute = ((4 + name.len()) as u16).to_ne_bytes().to_vec();
        attribute.extend(1u16.to_ne_bytes());
        attribute.extend(name);
        attribute.resize(attribute.len().next_multiple_of(4), 0);
        let mut message = ((20 + attribute.len()) as u32).to_ne_bytes().to_vec();
        message.extend((SUBSYSTEM_NFTABLES << 8 | kind).to_ne_bytes());
        message.extend([0; 10]);
        message.extend([family, 0, 0, 0]);
        message.extend(attribute);
        message
    }

    #[test]
    fn the_table_is_read_and_senseless_messages_are_none() {
        let whole = message(0, 1, b"weft-guard\0");
        assert_eq!(table_of(&whole).unwrap(), (1, b"weft-guard".to_vec()));
        assert!(table_of(&message(MESSAGE_NEWGEN, 0, &[0, 0, 0, 1])).is_none());
        for length in 0..24 {
            assert!(table_of(&whole[..length]).is_none(), "{length}");
        }
        assert!(table_of(&[0xff; 64]).is_none());
    }
}
