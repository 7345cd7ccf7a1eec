//! The verbs and options of `weft dco`. They are those of the kernel's own tool for its device.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use weft_openvpn::device::{MTU_DEFAULT, Mode, Slot};

/// Manage data channel devices by hand, in the kernel or in userspace.
#[derive(Debug, Subcommand)]
pub enum DcoCommand {
    /// Create a device and start a process that holds it and its sockets
    NewIface(NewIface),
    /// Show a device; for one in userspace also its drops by reason
    GetIface(OfDevice),
    /// Delete a device with its peers and stop the process that holds it
    DelIface(OfDevice),
    /// Create a peer that is reached over UDP or TCP
    NewPeer(NewPeer),
    /// Change a peer's addresses or keepalive times
    SetPeer(SetPeer),
    /// Show one peer or all peers, with counters
    GetPeer(GetPeer),
    /// Delete a peer with its keys
    DelPeer(OfPeer),
    /// Give a peer a key from a static key file
    NewKey(NewKey),
    /// Show the id and cipher of the key in a slot, never the key itself
    GetKey(OfKey),
    /// Swap the primary and secondary key of a peer
    SwapKeys(OfPeer),
    /// Erase a key
    DelKey(OfKey),
    /// Print events of peers until interrupted, one line of JSON each
    Listen(Listen),
    /// Send a control channel packet to a peer
    Packet(Packet),
    /// Hold a device; started by new-iface
    #[command(hide = true)]
    Hold(NewIface),
}

/// The device that moves the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The kernel's ovpn device (Linux 6.16)
    Kernel,
    /// Weft's device in userspace
    Userspace,
}

/// `new-iface`.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct NewIface {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// p2p for one peer; mp for many, chosen by VPN address and route
    #[arg(long, default_value = "p2p")]
    pub mode: Mode,
    /// Device to create (default: the kernel's if it has one)
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
    /// MTU of packets inside the tunnel in bytes, at most 65477
    #[arg(long, value_name = "BYTES", default_value_t = MTU_DEFAULT)]
    pub mtu: u32,
    /// MTU of paths over IPv6 in bytes, at least 1280, to which TCP inside fits its segments; userspace
    /// device only (default: 1280)
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(1_280..))]
    pub path_mtu: Option<u16>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A verb about a device.
#[derive(Debug, Args)]
pub struct OfDevice {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A verb about a peer.
#[derive(Debug, Args)]
pub struct OfPeer {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Id of the peer, 0 to 16777215
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A verb about a key.
#[derive(Debug, Args)]
pub struct OfKey {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Id of the peer
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// primary or secondary
    #[arg(value_name = "SLOT")]
    pub slot: Slot,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The settings of a peer.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
pub struct PeerWords {
    /// Id of the peer in packets from it, 0 to 16777215
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// Id of the peer in packets to it (default: the same)
    #[arg(long, value_name = "ID")]
    pub tx_id: Option<u32>,
    /// Address and UDP port of the peer
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub remote: Option<SocketAddr>,
    /// Source address of UDP packets to the peer (default: the system's choice until the peer is heard,
    /// then the address that it sends to)
    #[arg(long, value_name = "ADDRESS")]
    pub local: Option<IpAddr>,
    /// IPv4 address of the peer inside the VPN, for a device in mode mp
    #[arg(long, value_name = "ADDRESS")]
    pub vpn_ipv4: Option<Ipv4Addr>,
    /// IPv6 address of the peer inside the VPN, for a device in mode mp
    #[arg(long, value_name = "ADDRESS")]
    pub vpn_ipv6: Option<Ipv6Addr>,
    /// Send a ping after SECONDS without a sent packet
    #[arg(long, value_name = "SECONDS")]
    pub keepalive_interval: Option<u32>,
    /// Delete the peer after SECONDS without a received packet
    #[arg(long, value_name = "SECONDS")]
    pub keepalive_timeout: Option<u32>,
}

/// `new-peer`.
#[derive(Debug, Args)]
pub struct NewPeer {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The peer.
    #[command(flatten)]
    pub words: PeerWords,
    /// The transport.
    #[command(flatten)]
    pub carrier: Carrier,
    /// Firewall mark of packets that the peer's socket sends; peers that share the socket get it too
    #[arg(long, value_name = "MARK")]
    pub mark: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The transport to a peer.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[group(required = true, multiple = false)]
pub struct Carrier {
    /// Bind a UDP socket to this address; peers with the same address share it
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub udp: Option<SocketAddr>,
    /// Open a TCP connection to this address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp_connect: Option<SocketAddr>,
    /// Wait up to 30 seconds for a TCP connection to this address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp_listen: Option<SocketAddr>,
}

/// `set-peer`.
#[derive(Debug, Args)]
pub struct SetPeer {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The peer.
    #[command(flatten)]
    pub words: PeerWords,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `get-peer`.
#[derive(Debug, Args)]
pub struct GetPeer {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Id of the peer (default: all peers)
    #[arg(value_name = "PEER")]
    pub peer: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The ciphers of the data channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CipherWord {
    /// AES-128-GCM
    #[value(name = "aes-128-gcm")]
    Aes128Gcm,
    /// AES-192-GCM
    #[value(name = "aes-192-gcm")]
    Aes192Gcm,
    /// AES-256-GCM
    #[value(name = "aes-256-gcm")]
    Aes256Gcm,
    /// ChaCha20-Poly1305
    #[value(name = "chacha20-poly1305")]
    ChaCha20Poly1305,
}

/// The end of the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SideWord {
    /// Seals with the first half of the key file
    Client,
    /// Seals with the second half of the key file
    Server,
}

/// `new-key`.
#[derive(Debug, Args)]
pub struct NewKey {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The key.
    #[command(flatten)]
    pub words: KeyWords,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The settings of a key.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct KeyWords {
    /// Id of the peer
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// primary or secondary
    #[arg(value_name = "SLOT")]
    pub slot: Slot,
    /// Id of the key in packets, 0 to 7
    #[arg(value_name = "KEY-ID")]
    pub key_id: u32,
    /// Cipher of the key
    #[arg(long, value_enum, default_value = "aes-256-gcm")]
    pub cipher: CipherWord,
    /// This end of the tunnel; the peer must use the opposite one
    #[arg(long, value_enum)]
    pub side: SideWord,
    /// Derive a series of epoch keys, as OpenVPN 2.7 does; userspace device only
    #[arg(long)]
    #[serde(default)]
    pub epoch: bool,
    /// Static key file, as `openvpn --genkey secret FILE` makes it
    #[arg(long, value_name = "FILE")]
    pub key_file: PathBuf,
    /// Directory that records the keys this host has used
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR", default_value = weft_daemon::config::DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Accept a key that this host has sealed with before; for tests only, since nonces repeat and an
    /// eavesdropper can decrypt the traffic
    #[arg(long)]
    #[serde(default)]
    pub allow_reused_key: bool,
}

/// `listen`.
#[derive(Debug, Args)]
pub struct Listen {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Print control channel packets too
    #[arg(long)]
    pub packets: bool,
    /// Stop after N lines (default: run until interrupted)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// `packet`.
#[derive(Debug, Args)]
pub struct Packet {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Id of the peer
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// Bytes of the packet in hexadecimal, without the length field that TCP adds
    #[arg(value_name = "HEX")]
    pub bytes: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
