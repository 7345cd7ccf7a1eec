//! The gateway on the kernel's `ovpn` device: it takes data packets from the sockets, and leaves those of the control
//! channel to the tasks here.

use std::convert::Infallible;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::task::JoinSet;
use weft_crypto::DataCipher;
use weft_engine::dco::Event;
use weft_io::udp::recv_told;
use weft_kernel::ovpn::{OvpnDeviceSpec, OvpnWatch};
use weft_kernel::{CLIENTS_DEVICE, Kernel};
use weft_openvpn::Opcode;
use weft_openvpn::device::{
    CONTROL_PACKET_BYTES_MAX, DeletionReason, KeyAttributes, KeyDirection, Mode, Notification,
    PeerAttributes, Slot,
};
use weft_openvpn::negotiation::DEFAULT_CIPHERS;

use super::given::Given;
use super::{DataChannel, OpenError, Telling};
use crate::dco::{DataDevice, KernelDevice, KernelNews};
use crate::services::gateway::sockets::PORT;

/// Pause after a read that failed.
const READ_PAUSE: Duration = Duration::from_millis(100);
/// The peer for which ciphers are tried before there are clients. Its addresses are of documentation (RFC 5737): nothing
/// is sent to them, and the kernel takes none of loopback's.
const TRIED_PEER: u32 = 0;
const TRIED_REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const TRIED_VPN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// The tasks beside the device, which end with this value.
pub(super) struct Followers {
    _tasks: JoinSet<Infallible>,
}

/// Makes the device.
pub(super) async fn open(
    kernel: &Kernel,
    sockets: &[UdpSocket],
    telling: &Telling,
) -> Result<DataChannel, OpenError> {
    weft_kernel::ovpn::support().await?;
    // That of a daemon that was killed.
    super::remove_leftover(kernel).await;
    let mut watch = OvpnWatch::open().await?;
    let spec = OvpnDeviceSpec { name: CLIENTS_DEVICE.into(), mode: Mode::Mp, own: true };
    let made = kernel.create_ovpn_device(&spec).await?;
    let begun = async {
        let device = Arc::new(DataDevice::Kernel(KernelDevice::new(&made).await?));
        let ciphers = usable_ciphers(&device).await?;
        let mut tasks = JoinSet::new();
        let mut own = Vec::new();
        for (number, socket) in (0..).zip(sockets) {
            let failed = |error| OpenError::System { doing: "share a socket", error };
            let reader = socket.try_clone().map_err(failed)?;
            reader.set_nonblocking(true).map_err(failed)?;
            weft_io::udp::tell_destinations(&reader).map_err(failed)?;
            own.push((number, reader.try_clone().map_err(failed)?));
            let reader = tokio::net::UdpSocket::from_std(reader).map_err(failed)?;
            tasks.spawn(read(number, reader, telling.clone()));
        }
        let (followed, told) = (Arc::clone(&device), telling.clone());
        tasks.spawn(async move {
            let tell = |news| told.news(news);
            match &*followed {
                DataDevice::Kernel(device) => device.follow(&mut watch, &tell).await,
                DataDevice::Userspace(_) => std::future::pending().await,
            }
        });
        Ok(DataChannel {
            device,
            sockets: own,
            ciphers,
            reason: None,
            totals: Arc::default(),
            given: Given::default(),
            telling: telling.clone(),
            _followers: Some(Followers { _tasks: tasks }),
        })
    };
    let begun = begun.await;
    if begun.is_err() {
        super::remove_leftover(kernel).await;
    }
    begun
}

impl Telling {
    fn news(&self, news: KernelNews) {
        let what = match news {
            KernelNews::Told(what) => what,
            KernelNews::Lost => return,
            // The reason is not known; most peers expire.
            KernelNews::Gone { peer_id } => {
                Notification::PeerDeleted { peer_id, reason: DeletionReason::Expired }
            }
        };
        self.tell(Event::Notification(what));
    }
}

/// Reads the packets of the control channel from a socket.
async fn read(transport: u16, socket: tokio::net::UdpSocket, telling: Telling) -> Infallible {
    let mut buffer = vec![0; CONTROL_PACKET_BYTES_MAX];
    loop {
        let received = socket.async_io(Interest::READABLE, || recv_told(&socket, &mut buffer));
        match received.await {
            // The kernel leaves data on a socket that has no peer yet.
            Ok((length, ..)) if is_data(&buffer[..length]) => {}
            Ok((length, source, local)) => {
                let packet = buffer[..length].to_vec();
                telling.tell(Event::Packet { source, local, transport, packet });
            }
            // Such as an ICMP error of what was sent.
            Err(error) => {
                tracing::debug!(%error, "cannot read a packet of the control channel");
                tokio::time::sleep(READ_PAUSE).await;
            }
        }
    }
}

fn is_data(packet: &[u8]) -> bool {
    let opcode = packet.first().map(|first| Opcode::parse(*first));
    matches!(opcode, Some(Ok((Opcode::DataV1 | Opcode::DataV2, _))))
}

/// The ciphers that the kernel has: it refuses a key of another, for which it finds no module.
async fn usable_ciphers(device: &DataDevice) -> Result<Vec<DataCipher>, OpenError> {
    let failed = |error| OpenError::System { doing: "open a socket", error };
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    let peer = PeerAttributes {
        id: Some(TRIED_PEER),
        remote_ipv4: Some(TRIED_REMOTE),
        remote_port: Some(PORT),
        vpn_ipv4: Some(TRIED_VPN),
        ..PeerAttributes::default()
    };
    device.new_peer(socket.as_fd(), &peer).await.map_err(OpenError::Tried)?;
    let mut usable = Vec::new();
    let mut refused = None;
    for cipher in DEFAULT_CIPHERS {
        match device.new_key(&tried_key(cipher)).await {
            Ok(()) => usable.push(cipher),
            Err(error) => {
                tracing::info!(cipher = cipher.name(), %error, "the kernel lacks a cipher of OpenVPN's");
                refused = Some(error);
            }
        }
    }
    device.delete_peer(TRIED_PEER).await.map_err(OpenError::Tried)?;
    match refused {
        Some(error) if usable.is_empty() => Err(OpenError::NoCipher(error)),
        _ => Ok(usable),
    }
}

/// A key that seals nothing.
fn tried_key(cipher: DataCipher) -> KeyAttributes {
    let direction =
        || KeyDirection { cipher_key: vec![0; cipher.key_bytes()], ..KeyDirection::default() };
    KeyAttributes {
        peer_id: Some(TRIED_PEER),
        slot: Some(Slot::Secondary),
        key_id: Some(0),
        cipher: Some(cipher.into()),
        encrypt: Some(direction()),
        decrypt: Some(direction()),
    }
}
