//! `weft openvpn`: OpenVPN without the program of that name.

pub mod connect;
pub mod import;
pub mod qr;
