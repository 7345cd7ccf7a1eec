//! A second client that is none of OpenVPN's: minivpn, written in Go.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use weft_bench::comparison::install::{LeftOut, go_program};
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::try_wait_until;
use weft_lab::net::gateway::LIMIT;
use weft_lab::net::namespace;
use weft_lab::net::probe::connection_arrives;

use crate::pki::Keys;
use crate::stage::{SERVER, Stage};

const PACKAGE: &str = "github.com/ooni/minivpn/cmd/minivpn@v0.0.7";

#[test]
fn a_client_written_in_go_is_served_over_udp_and_tcp() -> anyhow::Result<()> {
    let program = match go_program("minivpn", PACKAGE) {
        Ok(program) => program.to_string_lossy().into_owned(),
        Err(LeftOut(why)) => {
            note(&format!("not tested here: minivpn: {why}"));
            return Ok(());
        }
    };
    let stage = Stage::new(Keys::Ecdsa)?;
    let machine = stage.machine(1)?;
    stage.pki.issue("mini", "mini", "client", 825)?;
    // It knows neither tls-auth nor tls-crypt.
    stage.imported(SERVER, &[])?;
    stage.serve(&["--listen", "1194", "--listen", "tcp:1194"])?;
    let container = stage.host().add_container_with("c1", &["--network", "openvpn"])?;
    let mut blocks = String::new();
    for (block, file) in [("ca", "ca.crt"), ("cert", "mini.crt"), ("key", "mini.key")] {
        blocks += &format!("<{block}>\n{}</{block}>\n", stage.pki.text(file)?);
    }
    for proto in ["udp", "tcp"] {
        let lines = format!(
            "proto {proto}\nremote {} 1194\ncipher AES-256-GCM\nauth SHA256\n",
            machine.gateway()
        );
        let config = stage.write("mini.ovpn", &format!("{lines}{blocks}"))?;
        let mut client = machine.netns.spawn(&[&program, "-config", &config, "-timeout", "600"])?;
        client.line_with("initialization-sequence-completed", LIMIT)?;
        let shown = stage.clients()?;
        let [shown] = &shown[..] else { anyhow::bail!("not one client: {shown:?}") };
        ensure!(shown["name"] == "mini" && shown["protocol"] == proto, "{shown}");
        let address = shown["addresses"][0].as_str().context("no address")?;
        // It gives its device the address; routes need a program of the machine's.
        let mut device = None;
        try_wait_until("its device", LIMIT, || {
            let links = machine.netns.exec(&["ip", "-j", "addr", "show", "up"])?.json()?;
            let links = links.as_array().cloned().unwrap_or_default();
            let its =
                links.iter().find(|link| link.to_string().contains(&format!("\"{address}\"")));
            device = its.and_then(|link| link["ifname"].as_str().map(str::to_owned));
            Ok(device.is_some())
        })?;
        let device = device.context("no device")?;
        machine.netns.ip(&format!("route replace 10.8.0.0/24 dev {device}"))?;
        machine.wait_ping("10.8.0.1".parse()?)?;
        let (from, inside) = (PathBuf::from(machine.netns.path()), namespace(&container));
        let own = (from.as_path(), address.parse()?);
        let to = container.ipv4()?.into();
        connection_arrives(own, (&inside, to))?;
        connection_arrives((&inside, to), own)?;
        client.kill();
        try_wait_until("the client to be gone", LIMIT, || {
            Ok(stage.clients().is_ok_and(|clients| clients.is_empty()))
        })?;
    }
    Ok(())
}
