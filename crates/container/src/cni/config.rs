//! The network configuration on standard input.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Map, Value};
use weft_packet::ethernet::Mac;

use super::{
    address::{self, RequestedAddress, first_of_each_family},
    daemon::{PortMapping, Wishes},
    environment::{Args, check_container},
    error::{CniError, Code},
    fields::Fields,
    result::{CniResult, Dns},
    version::{Version, supported},
};

/// The longest configuration accepted, in bytes: GC lists some 100 bytes for each attachment of a host.
pub const CONFIG_BYTES_MAX: usize = 4 << 20;
/// Most addresses that one container can ask for.
pub const REQUESTED_ADDRESSES_MAX: usize = 16;
/// Most aliases, labels, name servers, search domains or resolver options of one container.
pub const LIST_ENTRIES_MAX: usize = 256;
/// Most published ports of one container; runtimes list each port of a range.
pub const PORT_MAPPINGS_MAX: usize = 16_384;
/// The longest alias, label, domain or other text of a list, in bytes.
pub const TEXT_BYTES_MAX: usize = 1_024;

/// Reads standard input.
///
/// # Errors
/// Code 5 if it cannot be read, code 7 if it is longer than [`CONFIG_BYTES_MAX`].
pub fn read_config(input: impl Read) -> Result<Vec<u8>, CniError> {
    let mut bytes = Vec::new();
    let limit = u64::try_from(CONFIG_BYTES_MAX).unwrap_or(u64::MAX).saturating_add(1);
    input.take(limit).read_to_end(&mut bytes).map_err(|error| {
        CniError::new(Code::Io, "cannot read the configuration", error.to_string())
    })?;
    check_length(&bytes)?;
    Ok(bytes)
}

/// A configuration that is an object.
#[derive(Default)]
pub(super) struct Config {
    map: Map<String, Value>,
}

impl Config {
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, CniError> {
        check_length(bytes)?;
        let map = serde_json::from_slice(bytes).map_err(|error| {
            let why = format!("standard input is no JSON object: {error}");
            CniError::new(Code::Decode, "cannot decode the configuration", why)
        })?;
        Ok(Self { map })
    }

    /// The version, if it is a supported one.
    pub(super) fn known_version(&self) -> Option<Version> {
        Version::parse(self.map.get("cniVersion")?.as_str()?)
    }

    /// The version.
    ///
    /// # Errors
    /// Code 1 if Weft does not support it; code 6 if it is no text.
    pub(super) fn version(&self) -> Result<Version, CniError> {
        let text = self.fields().text("cniVersion")?.unwrap_or_default();
        Version::parse(text).ok_or_else(|| {
            let versions = supported();
            let why = match text {
                "" => format!("cniVersion is missing, which means 0.2.0; Weft supports {versions}"),
                _ => format!("the configuration has cniVersion {text:?}; Weft supports {versions}"),
            };
            CniError::new(Code::IncompatibleVersion, "incompatible CNI version", why)
        })
    }

    /// The network's name.
    pub(super) fn name(&self) -> Result<String, CniError> {
        let fields = self.fields();
        let name = fields.text("name")?.unwrap_or_default();
        if name.is_empty() {
            return Err(fields.wrong_value("name", "the configuration must name its network"));
        }
        check_container(name).map_err(|why| fields.wrong_value("name", &why))?;
        Ok(name.to_owned())
    }

    /// The network's name if it has a valid one. DEL must succeed without.
    pub(super) fn name_if_valid(&self) -> Option<String> {
        self.name().ok()
    }

    /// The daemon's runtime directory, if the configuration names one.
    pub(super) fn runtime_dir(&self) -> Result<Option<PathBuf>, CniError> {
        let fields = self.fields();
        let Some(text) = fields.text("runtimeDir")? else { return Ok(None) };
        if !Path::new(text).is_absolute() || text.contains('\0') {
            return Err(fields.wrong_value("runtimeDir", "it must be an absolute path"));
        }
        Ok(Some(text.into()))
    }

    /// The result of the plugins before, or of the ADD before.
    pub(super) fn previous(&self) -> Result<Option<CniResult>, CniError> {
        self.fields().value("prevResult")
    }

    /// The attachments that the runtime knows; `None` if it does not say.
    ///
    /// # Errors
    /// Code 6 if an entry is malformed: then nothing can be removed safely.
    pub(super) fn valid_attachments(&self) -> Result<Option<Vec<ValidAttachment>>, CniError> {
        let fields = self.fields();
        let keys = ["cni.dev/valid-attachments", "cni.dev/attachments"];
        let Some(key) = keys.into_iter().find(|key| fields.has(key)) else { return Ok(None) };
        fields.list(key, usize::MAX).map(Some)
    }

    /// The wishes for an attachment. A wish in `CNI_ARGS` counts where the configuration has none.
    pub(super) fn wishes(&self, variables: Args) -> Result<Wishes, CniError> {
        let fields = self.fields();
        self.check_supported()?;
        let capabilities = fields.object("runtimeConfig", "runtimeConfig.")?;
        let args = fields.object("args", "args.")?.object("cni", "args.cni.")?;
        let addresses = [addresses(capabilities)?, addresses(args)?, variables.addresses];
        Ok(Wishes {
            network: self.network()?,
            addresses: first_of_each_family(&addresses),
            mac: mac(capabilities)?.or(mac(args)?).or(variables.mac),
            default_route: fields.flag("isDefaultGateway")?,
            masquerade: fields.flag("ipMasq")?,
            allow_macs: fields.flag("allowMacs")?,
            owner: variables.owner,
            aliases: self.aliases(capabilities)?,
            labels: labels(args)?,
            port_mappings: port_mappings(capabilities)?,
        })
    }

    /// The resolver's settings: those of the capability, or else those of the configuration.
    pub(super) fn dns(&self) -> Result<Option<Dns>, CniError> {
        let fields = self.fields();
        let asked = fields.object("runtimeConfig", "runtimeConfig.")?;
        let asked = asked.object("dns", "runtimeConfig.dns.")?;
        let asked = Dns {
            nameservers: texts(asked, "servers")?,
            search: texts(asked, "searches")?,
            options: texts(asked, "options")?,
            ..Dns::default()
        };
        let fixed = fields.object("dns", "dns.")?;
        let fixed = Dns {
            nameservers: texts(fixed, "nameservers")?,
            domain: fixed.text("domain")?.unwrap_or_default().to_owned(),
            search: texts(fixed, "search")?,
            options: texts(fixed, "options")?,
            ..Dns::default()
        };
        Ok([asked, fixed].into_iter().find(|dns| *dns != Dns::default()))
    }

    /// Further names of the container: a list, or as podman has it, lists by the names of configurations.
    fn aliases(&self, capabilities: Fields<'_>) -> Result<Vec<String>, CniError> {
        let name = self.name()?;
        match capabilities.get("aliases") {
            Some(Value::Object(lists)) if lists.contains_key(&name) => {
                texts(capabilities.object("aliases", "runtimeConfig.aliases.")?, &name)
            }
            _ => texts(capabilities, "aliases"),
        }
    }

    /// Weft's network: `network`, or else the name of the configuration.
    fn network(&self) -> Result<String, CniError> {
        let fields = self.fields();
        match fields.text("network")? {
            Some(network) => {
                check_container(network).map_err(|why| fields.wrong_value("network", &why))?;
                Ok(network.to_owned())
            }
            None => self.name(),
        }
    }

    /// Fails if the configuration asks for something that Weft would silently not do.
    fn check_supported(&self) -> Result<(), CniError> {
        let fields = self.fields();
        // Names with a domain belong to others.
        let unknown = fields.all().find(|(key, value)| {
            !KNOWN_FIELDS.contains(&key.as_str()) && !key.contains(['/', '.']) && !value.is_null()
        });
        if let Some((key, value)) = unknown {
            let known = KNOWN_FIELDS.join(", ");
            let why = format!("Weft's plugin has no such field; it knows {known}");
            return Err(fields.unsupported(
                &super::error::shorten(key.clone(), TEXT_BYTES_MAX),
                value,
                &why,
            ));
        }
        let ipam = fields.object("ipam", "ipam.")?;
        if let Some(kind) =
            ipam.text("type")?.filter(|kind| !kind.is_empty() && *kind != PLUGIN_NAME)
        {
            let why = "Weft allocates addresses itself; leave out ipam";
            return Err(ipam.unsupported("type", &Value::from(kind), why));
        }
        let capabilities = fields.object("runtimeConfig", "runtimeConfig.")?;
        for (key, why) in FOREIGN_CAPABILITIES {
            if let Some(value) = capabilities.get(key) {
                return Err(capabilities.unsupported(key, value, why));
            }
        }
        Ok(())
    }

    fn fields(&self) -> Fields<'_> {
        Fields::of(&self.map)
    }
}

/// The plugin's `type`, and the name of its binary.
pub const PLUGIN_NAME: &str = "weft-cni";

/// Fields of a configuration that Weft reads, or may ignore.
const KNOWN_FIELDS: [&str; 15] = [
    "cniVersion",
    "cniVersions",
    "name",
    "type",
    "args",
    "capabilities",
    "runtimeConfig",
    "prevResult",
    "ipam",
    "dns",
    "ipMasq",
    "isDefaultGateway",
    "allowMacs",
    "network",
    "runtimeDir",
];

/// Capabilities that a configuration may give to Weft's plugin by mistake.
const FOREIGN_CAPABILITIES: [(&str, &str); 4] = [
    ("bandwidth", "give this capability to the plugin bandwidth, behind Weft's in the list"),
    ("ipRanges", "Weft allocates from its network's range; see weft status ipam"),
    ("deviceID", "Weft's ports are virtual; leave out this capability"),
    ("infinibandGUID", "Weft's ports are Ethernet; leave out this capability"),
];

/// An attachment that the runtime still knows.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ValidAttachment {
    /// The container's id.
    #[serde(rename = "containerID")]
    pub container: String,
    /// The interface in it.
    #[serde(rename = "ifname")]
    pub interface: String,
}

#[derive(Deserialize)]
struct Label {
    key: String,
    value: String,
}

fn addresses(fields: Fields<'_>) -> Result<Vec<RequestedAddress>, CniError> {
    let texts: Vec<String> = fields.list("ips", REQUESTED_ADDRESSES_MAX)?;
    let parse =
        |text: &String| address::parse_address(text).map_err(|why| fields.wrong_value("ips", &why));
    texts.iter().map(parse).collect()
}

fn mac(fields: Fields<'_>) -> Result<Option<Mac>, CniError> {
    let text = fields.text("mac")?.filter(|text| !text.is_empty());
    text.map(|text| address::parse_mac(text).map_err(|why| fields.wrong_value("mac", &why)))
        .transpose()
}

fn texts(fields: Fields<'_>, key: &str) -> Result<Vec<String>, CniError> {
    let texts: Vec<String> = fields.list(key, LIST_ENTRIES_MAX)?;
    match texts.iter().any(|text| text.len() > TEXT_BYTES_MAX) {
        true => {
            Err(fields.wrong_value(key, &format!("an entry is longer than {TEXT_BYTES_MAX} bytes")))
        }
        false => Ok(texts),
    }
}

fn labels(args: Fields<'_>) -> Result<Vec<(String, String)>, CniError> {
    let labels: Vec<Label> = args.list("labels", LIST_ENTRIES_MAX)?;
    if labels.iter().any(|label| label.key.len().max(label.value.len()) > TEXT_BYTES_MAX) {
        let why = format!("an entry is longer than {TEXT_BYTES_MAX} bytes");
        return Err(args.wrong_value("labels", &why));
    }
    Ok(labels.into_iter().map(|label| (label.key, label.value)).collect())
}

fn port_mappings(capabilities: Fields<'_>) -> Result<Vec<PortMapping>, CniError> {
    let mut mappings: Vec<PortMapping> = capabilities.list("portMappings", PORT_MAPPINGS_MAX)?;
    for mapping in &mut mappings {
        let wrong = |why: String| capabilities.wrong_value("portMappings", &why);
        mapping.protocol = match mapping.protocol.to_ascii_lowercase().as_str() {
            "" => "tcp".to_owned(),
            protocol @ ("tcp" | "udp" | "sctp") => protocol.to_owned(),
            _ => return Err(wrong("a protocol is none of tcp, udp and sctp".to_owned())),
        };
        if !mapping.host_ip.is_empty() && mapping.host_ip.parse::<std::net::IpAddr>().is_err() {
            return Err(wrong("a hostIP is no IP address".to_owned()));
        }
    }
    Ok(mappings)
}

fn check_length(bytes: &[u8]) -> Result<(), CniError> {
    match bytes.len() > CONFIG_BYTES_MAX {
        true => {
            let why = format!("standard input has more than {CONFIG_BYTES_MAX} bytes");
            Err(CniError::new(Code::InvalidConfig, "configuration too long", why))
        }
        false => Ok(()),
    }
}
