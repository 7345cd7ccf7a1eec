//! stub
use crate::IoError;
use std::net::*;
pub struct EncapSocket;
impl EncapSocket {
    pub fn bind(_: Option<IpAddr>, _: u16) -> Result<Self, IoError> {
        Ok(Self)
    }
    pub fn send_keepalive(&self, _: SocketAddr) -> std::io::Result<()> {
        Ok(())
    }
}
