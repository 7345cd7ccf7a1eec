//! `weft run`: a command in a new network namespace on the network.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

/// Bytes of a program's name in its attachment's name.
const NAME_BYTES_MAX: usize = 200;

use super::args::RunArgs;
use weft_api::call;
use weft_api::{AttachRequest, Attachment, Client};

/// Moves this process into a new network namespace, has the daemon attach it, then becomes the command.
///
/// The namespace lives as long as the command and its children; then the daemon releases its addresses.
pub(super) fn run(args: RunArgs, runtime_dir: &Path) -> anyhow::Result<ExitCode> {
    let Some((program, arguments)) = args.command.split_first() else {
        anyhow::bail!("name a command after --");
    };
    weft_io::namespace::unshare_network()
        .context("cannot make a network namespace; run this command as root")?;
    let request = AttachRequest {
        container: format!("pid:{}", std::process::id()),
        addresses: args.addresses,
        name: Some(name_of(program)),
        no_multicast_route: false,
        ipv6: false,
        default_route: args.default_route,
        allow_macs: false,
        network: args.network,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let attachment: Attachment = runtime.block_on(async {
        weft_kernel::Kernel::new()?.set_loopback_up().await?;
        anyhow::Ok(Client::new(runtime_dir).call::<call::Attach>(&request).await?)
    })?;
    super::output::notes(&attachment);
    drop(runtime);
    let error = std::process::Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {program}"))
}

/// A name that every host accepts: without control characters, and limited in length.
fn name_of(program: &str) -> String {
    let mut name = "run:".to_owned();
    for char in program.chars().filter(|char| !char.is_control()) {
        if name.len() + char.len_utf8() > NAME_BYTES_MAX {
            break;
        }
        name.push(char);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_any_name_has_one_that_hosts_take() {
        assert_eq!(name_of("bash"), "run:bash");
        assert_eq!(name_of("a\u{1b}[31m"), "run:a[31m");
        assert_eq!(name_of(&"\u{e9}".repeat(300)).len(), 200);
    }
}
