//! A data channel device, the kernel's `ovpn` device or Weft's own, behind one interface: the gateway, `weft openvpn
//! connect` and `weft dco` drive either by it (`docs/design/ovpn.md`).

mod book;
mod kernel;
mod keys;

use std::io;
use std::os::fd::BorrowedFd;

use weft_engine::dco::Device;
use weft_kernel::ovpn::{OvpnError, Refusal};
use weft_openvpn::device::{
    DeviceError, EpochAttributes, KeyAttributes, KeyState, PeerAttributes, PeerState, Slot,
};
use weft_openvpn::session::DataKeys;

pub use self::kernel::{KernelDevice, KernelNews};

/// A device. Requests and answers are the same for both; only the kernel's are waited for.
pub enum DataDevice {
    /// The kernel's. It stays when this value goes; its peers go with their sockets.
    Kernel(KernelDevice),
    /// Weft's own, which goes with this value.
    Userspace(Device),
}

/// Why a device refused, or could not be asked. It is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum DataDeviceError {
    /// The kernel's refusal.
    #[error(transparent)]
    Kernel(#[from] OvpnError),
    /// The refusal of Weft's own device.
    #[error(transparent)]
    Userspace(#[from] DeviceError),
    /// The caller's: epochs for the kernel's device.
    #[error("the kernel's device has no epochs: use a key without them, or a device in userspace")]
    NoEpochs,
    /// The process has too many descriptors open.
    #[error("cannot give the device a socket: {0}; raise the limit of open files")]
    Socket(io::Error),
}

impl DataDevice {
    /// Whether it is the kernel's.
    pub const fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel(_))
    }

    /// Makes a peer that is reached by `socket`: UDP, which peers may share, or a dedicated TCP connection. Weft's
    /// own device reads another descriptor of it. The kernel's leaves control packets on it, and the peer goes when
    /// the last descriptor is closed.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn new_peer(
        &self,
        socket: BorrowedFd<'_>,
        attributes: &PeerAttributes,
    ) -> Result<(), DataDeviceError> {
        match self {
            Self::Kernel(kernel) => kernel.new_peer(socket, attributes).await?,
            Self::Userspace(device) => {
                let own = socket.try_clone_to_owned().map_err(DataDeviceError::Socket)?;
                device.new_peer(own, attributes)?;
            }
        }
        Ok(())
    }

    /// Changes a peer's addresses, transmit id or keepalive; absent attributes stay as they are.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn set_peer(&self, attributes: &PeerAttributes) -> Result<(), DataDeviceError> {
        match self {
            Self::Kernel(kernel) => kernel.set_peer(attributes).await?,
            Self::Userspace(device) => device.set_peer(attributes)?,
        }
        Ok(())
    }

    /// Deletes a peer with its keys. The kernel takes tens of milliseconds.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn delete_peer(&self, id: u32) -> Result<(), DataDeviceError> {
        match self {
            Self::Kernel(kernel) => kernel.delete_peer(id).await?,
            Self::Userspace(device) => device.delete_peer(id)?,
        }
        Ok(())
    }

    /// A peer with its counters.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn peer(&self, id: u32) -> Result<PeerState, DataDeviceError> {
        Ok(match self {
            Self::Kernel(kernel) => kernel.peer(id).await?,
            Self::Userspace(device) => device.peer(id)?,
        })
    }

    /// All peers, in no order.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn peers(&self) -> Result<Vec<PeerState>, DataDeviceError> {
        Ok(match self {
            Self::Kernel(kernel) => kernel.peers().await?,
            Self::Userspace(device) => device.peers()?,
        })
    }

    /// Puts a session's key into a slot, in place of the present one.
    ///
    /// # Errors
    /// [`DataDeviceError`]; the kernel's device takes none with epochs.
    pub async fn install(
        &self,
        id: u32,
        slot: Slot,
        keys: &DataKeys,
    ) -> Result<(), DataDeviceError> {
        match keys.has_epochs {
            true => self.new_epochs(keys.epoch_attributes(id, slot)),
            false => self.new_key(&keys.attributes(id, slot)).await,
        }
    }

    /// Puts a key into a slot, in place of the present one.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn new_key(&self, attributes: &KeyAttributes) -> Result<(), DataDeviceError> {
        match self {
            Self::Kernel(kernel) => kernel.new_key(attributes).await?,
            Self::Userspace(device) => device.new_key(attributes)?,
        }
        Ok(())
    }

    /// Puts epochs into a slot, in the place of a key.
    ///
    /// # Errors
    /// [`DataDeviceError`]; the kernel's device takes none.
    pub fn new_epochs(&self, attributes: EpochAttributes) -> Result<(), DataDeviceError> {
        match self {
            Self::Kernel(_) => Err(DataDeviceError::NoEpochs),
            Self::Userspace(device) => Ok(device.new_epochs(attributes)?),
        }
    }

    /// The state of the key in a slot.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn key(&self, id: u32, slot: Slot) -> Result<KeyState, DataDeviceError> {
        Ok(match self {
            Self::Kernel(kernel) => kernel.key(id, slot).await?,
            Self::Userspace(device) => device.key(id, slot)?,
        })
    }

    /// Exchanges the primary and the secondary key of a peer.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn swap_keys(&self, id: u32) -> Result<(), DataDeviceError> {
        match self {
            Self::Kernel(kernel) => kernel.swap_keys(id).await?,
            Self::Userspace(device) => device.swap_keys(id)?,
        }
        Ok(())
    }

    /// Empties a slot of a peer.
    ///
    /// # Errors
    /// [`DataDeviceError`].
    pub async fn delete_key(&self, id: u32, slot: Slot) -> Result<(), DataDeviceError> {
        match self {
            Self::Kernel(kernel) => kernel.delete_key(id, slot).await?,
            Self::Userspace(device) => device.delete_key(id, slot)?,
        }
        Ok(())
    }
}

impl DataDeviceError {
    /// The error number (errno(3)) of the refusal, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel(error) => error.errno(),
            Self::Userspace(error) => Some(error.errno()),
            Self::NoEpochs => Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()),
            Self::Socket(error) => error.raw_os_error(),
        }
    }

    /// Whether the subject of the request no longer exists.
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Kernel(error) => kernel::is_gone(error),
            Self::Userspace(error) => matches!(
                error,
                DeviceError::NoPeer(_) | DeviceError::NoKey { .. } | DeviceError::NoDevice
            ),
            Self::NoEpochs | Self::Socket(_) => false,
        }
    }

    /// Whether another peer has one of the addresses inside, perhaps one that is being deleted.
    pub fn is_address_taken(&self) -> bool {
        match self {
            Self::Kernel(error) => error.refusal() == Some(Refusal::AddressTaken),
            Self::Userspace(error) => matches!(error, DeviceError::VpnAddressTaken),
            Self::NoEpochs | Self::Socket(_) => false,
        }
    }
}
