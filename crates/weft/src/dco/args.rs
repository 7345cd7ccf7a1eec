//! The words of `weft dco`: those of the kernel's own tool for its device.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use weft_openvpn::device::{MTU_DEFAULT, Mode, Slot};

/// Drive a data channel device by hand, the kernel's or one in userspace.
#[derive(Debug, Subcommand)]
pub enum DcoCommand {
    /// Make a device, and start a process that holds it and its sockets
    NewIface(NewIface),
    /// Show a device, and of one in userspace how many packets it dropped and why
    GetIface(OfDevice),
    /// Remove a device with its peers, and end the process that holds it
    DelIface(OfDevice),
    /// Make a peer that is reached over UDP or over a TCP connection
    NewPeer(NewPeer),
    /// Change a peer's addresses or signs of life
    SetPeer(SetPeer),
    /// Show one peer, or all of them, with their counters
    GetPeer(GetPeer),
    /// Delete a peer with its keys
    DelPeer(OfPeer),
    /// Give a peer a key from a static key file
    NewKey(NewKey),
    /// Show which key is in a slot (never the key)
    GetKey(OfKey),
    /// Exchange the primary and the secondary key of a peer
    SwapKeys(OfPeer),
    /// Erase a key
    DelKey(OfKey),
    /// Print what happens to peers, one line of JSON each, until interrupted
    Listen(Listen),
    /// Send a packet of the control channel beside the data
    Packet(Packet),
    /// Hold a device; new-iface starts this itself
    #[command(hide = true)]
    Hold(NewIface),
}

/// Which device moves the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The kernel's module ovpn (Linux 6.16)
    Kernel,
    /// Weft's own
    Userspace,
}

/// `new-iface`.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct NewIface {
    /// The device's name
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// One peer (p2p), or many that are chosen by VPN address and route (mp)
    #[arg(long, default_value = "p2p")]
    pub mode: Mode,
    /// Which device (default: the kernel's where there is one)
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,
    /// MTU inside, in bytes: at most 65477, which fill a datagram
    #[arg(long, value_name = "BYTES", default_value_t = MTU_DEFAULT)]
    pub mtu: u32,
    /// What ways over IPv6 carry, in bytes: TCP inside is told what fits, what is longer all the same is counted (default
    /// 1280, which all carry; the userspace device's alone)
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(1_280..))]
    pub path_mtu: Option<u16>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A verb about a device.
#[derive(Debug, Args)]
pub struct OfDevice {
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A verb about a peer.
#[derive(Debug, Args)]
pub struct OfPeer {
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The peer's id, 0 to 16777215
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A verb about a key.
#[derive(Debug, Args)]
pub struct OfKey {
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The peer's id
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// primary or secondary
    #[arg(value_name = "SLOT")]
    pub slot: Slot,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What is said of a peer.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
pub struct PeerWords {
    /// The peer's id, which its packets bear, 0 to 16777215
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// The id that packets to the peer bear (default: the same)
    #[arg(long, value_name = "ID")]
    pub tx_id: Option<u32>,
    /// Where the peer is, over UDP
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub remote: Option<SocketAddr>,
    /// The address of this host that is sent from, over UDP (default: the system's choice, and once the
    /// peer was heard, the one that it sends to)
    #[arg(long, value_name = "ADDRESS")]
    pub local: Option<IpAddr>,
    /// The peer's address inside the VPN, for a device in mode mp
    #[arg(long, value_name = "ADDRESS")]
    pub vpn_ipv4: Option<Ipv4Addr>,
    /// The peer's IPv6 address inside the VPN
    #[arg(long, value_name = "ADDRESS")]
    pub vpn_ipv6: Option<Ipv6Addr>,
    /// Seconds without anything sent after which a ping goes out
    #[arg(long, value_name = "SECONDS")]
    pub keepalive_interval: Option<u32>,
    /// Seconds without anything received after which the peer is deleted
    #[arg(long, value_name = "SECONDS")]
    pub keepalive_timeout: Option<u32>,
}

/// `new-peer`.
#[derive(Debug, Args)]
pub struct NewPeer {
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The peer.
    #[command(flatten)]
    pub words: PeerWords,
    /// How it is reached.
    #[command(flatten)]
    pub carrier: Carrier,
    /// Mark of the packets that its socket sends, for the host's packet filter and routes; peers that
    /// share the socket get it too
    #[arg(long, value_name = "MARK")]
    pub mark: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How a peer is reached.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[group(required = true, multiple = false)]
pub struct Carrier {
    /// A UDP socket bound here; peers named with the same address share it
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub udp: Option<SocketAddr>,
    /// A TCP connection that this end opens
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp_connect: Option<SocketAddr>,
    /// A TCP connection that the other end opens within 30 seconds
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp_listen: Option<SocketAddr>,
}

/// `set-peer`.
#[derive(Debug, Args)]
pub struct SetPeer {
    /// The device
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
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The peer's id (default: all peers)
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

/// Which end of the tunnel this is.
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
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The key.
    #[command(flatten)]
    pub words: KeyWords,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What is said of a key.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct KeyWords {
    /// The peer's id
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// primary or secondary
    #[arg(value_name = "SLOT")]
    pub slot: Slot,
    /// What packets sealed with it bear, 0 to 7
    #[arg(value_name = "KEY-ID")]
    pub key_id: u32,
    /// The cipher
    #[arg(long, value_enum, default_value = "aes-256-gcm")]
    pub cipher: CipherWord,
    /// Which end this is: the other one must be the other
    #[arg(long, value_enum)]
    pub side: SideWord,
    /// Epochs in the place of one key, as OpenVPN 2.7 has them (a device in userspace only)
    #[arg(long)]
    #[serde(default)]
    pub epoch: bool,
    /// A static key file, as `openvpn --genkey secret FILE` makes it
    #[arg(long, value_name = "FILE")]
    pub key_file: PathBuf,
    /// Directory where this host records which keys it has used
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR", default_value = weft_daemon::config::DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Take a key that this host has sealed with before; for tests: nonces repeat, and who listens can decrypt
    #[arg(long)]
    #[serde(default)]
    pub allow_reused_key: bool,
}

/// `listen`.
#[derive(Debug, Args)]
pub struct Listen {
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// Print the packets of the control channel too
    #[arg(long)]
    pub packets: bool,
    /// End after so many lines (default: go on)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// `packet`.
#[derive(Debug, Args)]
pub struct Packet {
    /// The device
    #[arg(value_name = "DEVICE")]
    pub device: String,
    /// The peer's id
    #[arg(value_name = "PEER")]
    pub peer: u32,
    /// The packet's bytes in hexadecimal digits, without the length that a TCP connection puts in front
    #[arg(value_name = "HEX")]
    pub bytes: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
