//! How others reach this host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use weft_kernel::Kernel;

/// The address at which others reach this host: the configured one, else the source address that its routing
/// table selects. Sends no packets.
pub(crate) async fn own_address(configured: Option<IpAddr>, kernel: &Kernel) -> Option<String> {
    if let Some(address) = configured {
        return Some(address.to_string());
    }
    let near = near(kernel).await;
    // Documentation addresses (RFC 5737, RFC 3849), which only a default route leads to.
    let far = [
        IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)),
        IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 1)),
    ];
    far.iter().chain(&near).find_map(|remote| {
        let any = if remote.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect((*remote, 9)).ok()?;
        let address = socket.local_addr().ok()?.ip();
        (!address.is_loopback() && !address.is_unspecified()).then(|| address.to_string())
    })
}

/// An address in each network that this host reaches without a router; networks of its own containers come
/// last.
async fn near(kernel: &Kernel) -> Vec<IpAddr> {
    let mut routes = kernel.host_routes().await.unwrap_or_default();
    routes.sort_by_key(|route| route.stays_on_host);
    routes.iter().filter_map(|route| route.destination.hosts().next()).collect()
}
