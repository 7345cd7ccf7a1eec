//! The OpenVPN gateway and its clients, for people.

use std::fmt::Write as _;

use weft_api::{
    Auth, Authority, AuthorityHome, Gateway, OtherGateway, Revoked, UserChanged, VpnClient, VpnUser,
};

use super::{age, table};

pub(in crate::cli) fn authority(authority: &Authority) -> String {
    let Authority { name, fingerprint, not_after, clients, revoked, home } = authority;
    let home =
        home.as_ref().map(|home| format!("\nhost {home} has its private key")).unwrap_or_default();
    format!(
        "{name}, good until {not_after}\nSHA-256: {fingerprint}\n{clients} certificates of clients, {revoked} revoked{home}"
    )
}

pub(in crate::cli) fn gateway(gateway: &Gateway) -> String {
    let Gateway {
        state,
        reason,
        listen,
        network,
        clients,
        engine,
        engine_reason,
        status_file,
        management,
        ..
    } = gateway;
    if state == "off" {
        return "no OpenVPN clients are served".into();
    }
    let listen: Vec<String> = listen.iter().map(ToString::to_string).collect();
    let reason = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let mut text = format!("{state}{reason}");
    if !listen.is_empty() {
        let _ = write!(text, " on {}", listen.join(", "));
    }
    let _ = write!(text, ", network {network}, {clients} clients");
    if !engine.is_empty() {
        let _ = write!(text, ", {engine} engine");
    }
    if let Some(reason) = engine_reason {
        let _ = write!(text, " (not the kernel's: {reason})");
    }
    text.push_str(match gateway.auth {
        Auth::Certificate => "",
        Auth::Password => ", with passwords alone",
        Auth::Both => ", with certificates and passwords",
        Auth::Oidc => ", with certificates and logins by a web page",
    });
    if let Some(file) = status_file {
        let _ = write!(text, ", status file {}", file.display());
    }
    if let Some(place) = management {
        let _ = write!(text, ", management interface {place}");
    }
    text.push_str(match gateway.way_out.as_slice() {
        [] => "",
        [_] => ", a way out by IPv4 alone",
        _ => ", a way out by IPv4 and IPv6",
    });
    for (rate, way) in [(gateway.client_up, "from"), (gateway.client_down, "to")] {
        if let Some(rate) = rate {
            let _ = write!(text, ", at most {rate} bit/s {way} a client");
        }
    }
    text
}

/// The host that has the authority's private key, for `weft status`.
pub(in crate::cli) fn authority_home(home: &AuthorityHome) -> String {
    let AuthorityHome { name, is_here, is_linked, as_of, .. } = home;
    match (is_here, is_linked) {
        (true, _) => "this host".into(),
        (false, true) => format!("host {name}"),
        (false, false) => format!("host {name}, which is not linked; as of {as_of}"),
    }
}

/// The gateways on other hosts, for `weft status`.
pub(in crate::cli) fn other_gateways(gateways: &[OtherGateway]) -> String {
    let one = |it: &OtherGateway| format!("{} {}", it.name, it.state);
    let all: Vec<String> = gateways.iter().map(one).collect();
    let agreed = "clients' addresses are the word of the host where they first connected";
    format!("{}; {agreed}", all.join(", "))
}

pub(in crate::cli) fn revoked(revoked: &Revoked) -> String {
    let Revoked { name, serials, was_connected } = revoked;
    let ended = if *was_connected { "; its session has ended" } else { "" };
    match serials.len() {
        // Those of a foreign authority are not known one by one.
        0 => format!("all certificates of {name} are refused from now on{ended}"),
        count => format!("{count} certificates of {name} revoked{ended}"),
    }
}

pub(in crate::cli) fn user_changed(changed: &UserChanged) -> String {
    let UserChanged { name, was_connected, otpauth } = changed;
    let mut text = format!("{name}: done");
    if *was_connected {
        text.push_str("; the session has ended");
    }
    if let Some(otpauth) = otpauth {
        let _ = write!(
            text,
            "\nGive this to an authenticator now; it is a secret, and is not shown again:\n{otpauth}"
        );
    }
    text
}

pub(in crate::cli) fn vpn_users(users: &[VpnUser]) -> String {
    if users.is_empty() {
        return "there are no users: weft openvpn user add NAME".into();
    }
    let mut table = table(&["NAME", "CODES", "ADDED", "PASSWORD SET"]);
    for user in users {
        let codes = if user.totp { "yes" } else { "no" };
        let (added, set) = (age(&user.added), age(&user.password_set));
        table.add_row([user.name.clone(), codes.to_owned(), added, set]);
    }
    table.to_string()
}

pub(in crate::cli) fn clients(clients: &[VpnClient]) -> String {
    if clients.is_empty() {
        return "no OpenVPN client is connected".into();
    }
    let mut table = table(&[
        "NAME",
        "ADDRESSES",
        "FROM",
        "BY",
        "CIPHER",
        "ENGINE",
        "BYTES IN",
        "BYTES OUT",
        "SINCE",
        "LAST HANDSHAKE",
    ]);
    for client in clients {
        let addresses: Vec<String> = client.addresses.iter().map(ToString::to_string).collect();
        table.add_row([
            client.name.clone(),
            addresses.join(" "),
            client.real_address.to_string(),
            client.protocol.to_string(),
            client.cipher.clone(),
            client.engine.clone(),
            client.bytes_in.to_string(),
            client.bytes_out.to_string(),
            age(&client.since),
            age(&client.last_handshake),
        ]);
    }
    table.to_string()
}
