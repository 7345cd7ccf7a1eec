//! The configuration that runtimes load.

use std::{
    collections::BTreeMap,
    io,
    path::{self, PathBuf},
};

use serde::Serialize;

use super::{
    super::{PLUGIN_NAME, Version},
    Options,
    chained::Chained,
};

/// The configuration's file. Runtimes that take one file only take the first by name.
pub const CONFLIST_NAME: &str = "10-weft.conflist";

/// Runtimes of old libraries read `cniVersion` alone and stop at this one; newer ones take the highest of
/// `cniVersions`.
const FOR_OLD_RUNTIMES: Version = Version::V1_0_0;

/// A chained plugin that is installed.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) chained: &'static Chained,
    pub(super) versions: Vec<Version>,
}

impl Entry {
    pub(super) fn name(&self) -> &'static str {
        self.chained.name
    }

    pub(super) fn is_old(&self) -> bool {
        !self.versions.contains(&Version::LATEST)
    }
}

/// The versions that all plugins of the list speak, oldest first.
pub(super) fn agreed_versions<'a>(chained: impl Iterator<Item = &'a [Version]>) -> Vec<Version> {
    let chained: Vec<&[Version]> = chained.collect();
    let agreed = |version: &Version| chained.iter().all(|versions| versions.contains(version));
    Version::ALL.into_iter().filter(agreed).collect()
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Conflist<'a> {
    cni_version: &'static str,
    cni_versions: Vec<&'static str>,
    #[serde(skip_serializing_if = "is_false")]
    disable_check: bool,
    name: &'a str,
    plugins: Vec<Plugin<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Plugin<'a> {
    r#type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime_dir: Option<PathBuf>,
    capabilities: BTreeMap<&'a str, bool>,
    #[serde(skip_serializing_if = "is_false")]
    is_default_gateway: bool,
    #[serde(skip_serializing_if = "is_false")]
    ip_masq: bool,
    #[serde(skip_serializing_if = "is_false")]
    snat: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// The file's text.
pub(super) fn text(
    options: &Options,
    versions: &[Version],
    chained: &[Entry],
) -> io::Result<String> {
    let newest = versions.iter().rev().find(|version| **version <= FOR_OLD_RUNTIMES);
    let capabilities = |names: &[&'static str]| names.iter().map(|name| (*name, true)).collect();
    let weft = Plugin {
        r#type: PLUGIN_NAME,
        network: options.network.as_deref(),
        // Runtimes run the plugin in directories of their own.
        runtime_dir: options.runtime_dir.as_deref().map(path::absolute).transpose()?,
        capabilities: capabilities(&["aliases", "dns", "ips", "mac"]),
        is_default_gateway: options.masquerade,
        ip_masq: options.masquerade,
        snat: false,
    };
    let others = chained.iter().map(|Entry { chained, .. }| Plugin {
        r#type: chained.name,
        network: None,
        runtime_dir: None,
        capabilities: capabilities(&[chained.capability]),
        is_default_gateway: false,
        ip_masq: false,
        snat: chained.snat,
    });
    let list = Conflist {
        cni_version: newest.copied().unwrap_or(FOR_OLD_RUNTIMES).as_str(),
        cni_versions: versions.iter().copied().map(Version::as_str).collect(),
        // CHECK of portmap 1.1.1 fails where ip6tables works, that of bandwidth before 1.9.1 without a limit.
        disable_check: !chained.is_empty(),
        name: &options.name,
        plugins: std::iter::once(weft).chain(others).collect(),
    };
    // A path that is not UTF-8 does not serialize.
    Ok(serde_json::to_string_pretty(&list)? + "\n")
}
