//! Getting credentials: the first for a token, the next ones for those that there are.

use std::{path::Path, sync::Arc};

use fs_mapper::config::TlsHost;
use posh_proto::{
    executor::{EnrolRequest, IssuedCertificate, RenewRequest, enrolment_client::EnrolmentClient},
    token::{Fingerprint, Token},
    untrusted::escaped,
};
use rcgen::{CertificateParams, KeyPair};
use tonic::{Status, transport::Channel};

use super::{Fault, credentials::Credentials, handshake, over, trust};

/// Makes a key here, lets the executor sign for it and stores both in the file `path`. The secret of the
/// token goes to nobody but who the token names.
///
/// # Errors
/// [`Fault`]; nothing is stored then.
pub async fn enrol(host: &TlsHost, token: &Token, path: &Path) -> Result<Credentials, Fault> {
    let stream = handshake(host, Arc::new(trust::config_for(token.authority)?)).await?;
    let channel = over(stream, host, path, None).await?;
    let (key, signing_request) = request()?;
    let secret = token.secret.to_vec().into();
    let request = EnrolRequest { secret, signing_request: signing_request.into() };
    let issued = EnrolmentClient::new(channel).enrol(request).await.map_err(|status| refused(&status))?.into_inner();
    if !Fingerprint::of(&issued.authority).is(&token.authority) {
        return Err(Fault::Refused("the executor answered with another authority than the token's".to_owned()));
    }
    // Enrolled anew at the same server, this workstation goes on with what it keeps of it.
    let same = Credentials::load(path, host).ok().filter(|present| issued.authority == present.authority);
    keep(key, issued, path, same.map(|present| present.server()))
}

/// Gets other credentials over a connection with the present ones, and stores them.
///
/// # Errors
/// [`Fault`]; the present ones stay then.
pub async fn renew(channel: Channel, host: &TlsHost, path: &Path) -> Result<Credentials, Fault> {
    let present = Credentials::load(path, host)?;
    let (key, signing_request) = request()?;
    let request = RenewRequest { signing_request: signing_request.into() };
    let issued = EnrolmentClient::new(channel).renew(request).await.map_err(|status| refused(&status))?.into_inner();
    if issued.authority != present.authority {
        return Err(Fault::Refused("the executor answered with another authority than it had".to_owned()));
    }
    keep(key, issued, path, Some(present.server()))
}

fn keep(key: KeyPair, issued: IssuedCertificate, path: &Path, server: Option<String>) -> Result<Credentials, Fault> {
    let credentials = Credentials { server, ..Credentials::new(key.serialize_pem(), issued) };
    // What can't be used must not replace what can.
    trust::config_of(&credentials, path)?;
    credentials.save(path)?;
    Ok(credentials)
}

fn request() -> Result<(KeyPair, Vec<u8>), Fault> {
    let failed = |error: rcgen::Error| Fault::Setup(error.to_string());
    let key = KeyPair::generate().map_err(failed)?;
    let request = CertificateParams::default().serialize_request(&key).map_err(failed)?;
    Ok((key, request.der().to_vec()))
}

fn refused(status: &Status) -> Fault {
    Fault::Refused(escaped(status.message()).into_owned())
}
