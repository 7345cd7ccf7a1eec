//! Where clients go beside their network: to the networks that they are pushed routes to, and, with
//! `redirect-gateway`, to all that this host reaches. And how much each of them may send and get.

use std::collections::BTreeSet;

use ipnet::IpNet;
use weft_api::{ApiError, ErrorKind, Rate};
use weft_kernel::ClientWays;

use super::push::{Inside, is_everywhere, redirects, route_of};
use super::{Gateway, Wanted};
use crate::services::networks::OnNetwork;

impl Gateway {
    /// Whether this host is to let clients out: all of them, or those that the configuration that was taken over says.
    fn leads_out(&self, wanted: &Wanted) -> bool {
        let import = self.imported_now();
        wanted.request.redirect_gateway
            || import.is_some_and(|import| import.all_pushes().any(|option| redirects(option)))
    }

    /// Refuses to serve where clients are to be let out, and the host or the network lets nobody out: they would lose
    /// what they reach without it.
    pub(super) fn check_way_out(
        &self,
        wanted: &Wanted,
        network: &OnNetwork,
    ) -> Result<(), ApiError> {
        if !self.leads_out(wanted) {
            return Ok(());
        }
        let conflict = |text| ApiError::new(ErrorKind::Conflict, text);
        let checked = self.attachments.check_way_out(network);
        checked.map_err(|error| conflict(format!("redirect-gateway: {error}")))
    }

    /// Why this host lets nobody out.
    pub(super) fn forwarding_fault(&self) -> Option<String> {
        let error = self.attachments.check_forwarding().err()?;
        Some(format!("redirect-gateway: {error}"))
    }

    /// Why clients are not let out now, though they are to be.
    pub(super) fn way_out_fault(&self, wanted: &Wanted) -> Option<String> {
        self.leads_out(wanted).then(|| self.forwarding_fault())?
    }

    /// Where clients may go.
    pub(super) fn ways(&self, wanted: &Wanted, inside: &Inside, has_ipv6: bool) -> ClientWays {
        let import = self.imported_now();
        let of_import = import.iter().flat_map(|import| import.all_pushes());
        let routes =
            wanted.request.pushes.iter().chain(of_import).filter_map(|option| route_of(option));
        let is_own = |route: &IpNet| inside.own.iter().any(|it| it.trunc().contains(route));
        let is_elsewhere = |route: &IpNet| !is_own(route) && !is_everywhere(route);
        let networks: BTreeSet<IpNet> = routes.filter(is_elsewhere).collect();
        let families = inside.own.iter().filter(|it| it.addr().is_ipv4() || has_ipv6);
        let ranges: BTreeSet<IpNet> =
            families.filter(|_| self.leads_out(wanted)).map(IpNet::trunc).collect();
        ClientWays {
            connects_clients: import.is_none_or(|import| import.connects_clients()),
            networks: networks.into_iter().collect(),
            way_out: ranges.into_iter().collect(),
            up: wanted.request.client_up.map(bytes),
            down: wanted.request.client_down.map(bytes),
        }
    }
}

/// Bytes a second.
const fn bytes(rate: Rate) -> u64 {
    rate.bits() / 8
}

/// The families in which clients are let out, for `weft status`.
pub(super) fn families(ways: &ClientWays) -> Vec<String> {
    let has = |is_ipv4: bool| ways.way_out.iter().any(|it| it.addr().is_ipv4() == is_ipv4);
    let all = [("ipv4", has(true)), ("ipv6", has(false))];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name.to_owned()).collect()
}
