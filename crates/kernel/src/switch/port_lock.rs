//! What a locked port may send from.

use std::net::{IpAddr, Ipv6Addr};

use weft_packet::ethernet::Mac;

use crate::error::KernelError;

/// Most addresses of one lock, the link-local one apart.
pub const LOCK_ADDRESSES_MAX: usize = 64;

/// The addresses that a container's port may send from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortLock {
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Its IP addresses, [`LOCK_ADDRESSES_MAX`] at most. The link-local address of its Ethernet address counts too.
    pub addresses: Vec<IpAddr>,
}

impl PortLock {
    /// The link-local address with the modified EUI-64 of the Ethernet address (RFC 4291 appendix A). A container with
    /// another link-local address cannot use it.
    #[must_use]
    pub fn link_local(&self) -> Ipv6Addr {
        Mac(self.mac).link_local()
    }

    /// Refuses a lock with more than [`LOCK_ADDRESSES_MAX`] addresses.
    ///
    /// # Errors
    /// [`KernelError::LockTooLong`].
    pub(crate) fn check(&self, port: &str) -> Result<(), KernelError> {
        let (port, count) = (port.to_owned(), self.addresses.len());
        match count <= LOCK_ADDRESSES_MAX {
            true => Ok(()),
            false => Err(KernelError::LockTooLong { port, count, limit: LOCK_ADDRESSES_MAX }),
        }
    }

    /// All its addresses, with the link-local one.
    pub fn senders(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().copied().chain([self.link_local().into()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_local_address_is_that_of_rfc_4291() {
        let lock = PortLock { mac: [0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde], addresses: Vec::new() };
        assert_eq!(lock.link_local().to_string(), "fe80::3656:78ff:fe9a:bcde");
    }
}
